// torch's reduce_kernel. Sums are added up in double precision, in the order of the elements.
#include <cmath>
#include <limits>

#include "compute.h"
#include "offsets.h"

namespace compute {
namespace {

struct Reduction {
  Type from, to;
  size_t object, neutral;  // bytes of the operation, and of the neutral element that follows
  double first;            // what a sum begins with
  std::function<double(double, double)> add;
  std::function<double(double)> finish;
  bool finds_place = false;  // the first such element; the second result, or the only one
};

double same(double value) { return value; }
double sum(double a, double b) { return a + b; }
double greatest(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
double least(double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }

constexpr double infinity = std::numeric_limits<double>::infinity();

// Operations of one kind: the wrapper of an operation without members, which follow each other in the name.
std::optional<Reduction> wrapped(const std::string& operation, Type from, Type to) {
  if (auto given = arguments_of("sum_functor", operation); given.size() == 3) {
    auto neutral = type_named(given[1]);
    if (!neutral) return {};
    return Reduction{from, to, 1, width_of(*neutral), 0, sum, same};
  }
  if (auto given = arguments_of("prod_functor", operation); given.size() == 3) {
    auto neutral = type_named(given[1]);
    if (!neutral) return {};
    return Reduction{from, to, 1, width_of(*neutral), 1, [](double a, double b) { return a * b; }, same};
  }
  if (auto given = arguments_of("MaxNanFunctor", operation); given.size() == 1)
    return Reduction{from, to, 1, width_of(from), -infinity, greatest, same};
  if (auto given = arguments_of("MinNanFunctor", operation); given.size() == 1)
    return Reduction{from, to, 1, width_of(from), infinity, least, same};
  if (operation.find("and_kernel_cuda") != std::string::npos)
    return Reduction{from, to, 1, 1, 1, [](double a, double b) { return double(a != 0 && b != 0); }, same};
  if (operation.find("or_kernel_cuda") != std::string::npos)
    return Reduction{from, to, 1, 1, 0, [](double a, double b) { return double(a != 0 || b != 0); }, same};
  return {};
}

std::optional<Reduction> reduction_of(const std::vector<std::string>& given, const char* object) {
  auto from = type_named(given[0]), to = type_named(given[3]);
  if (!from || !to) return {};
  Template operation = take_apart(given[1]);
  if (operation.base == "func_wrapper_t") return wrapped(given[1], *from, *to);
  if (operation.base == "MeanOps") {
    Type type = wide(*from);
    double factor = load(type, object);
    return Reduction{*from, *to, width_of(type), width_of(type), 0, sum, [=](double all) { return all * factor; }};
  }
  if (operation.base == "NormTwoOps") {
    return Reduction{*from, *to, 1, width_of(wide(*from)), 0, [](double a, double b) { return a + b * b; },
                     [](double all) { return std::sqrt(all); }};
  }
  bool maximum = operation.base == "MaxOps" || operation.base == "ArgMaxOps";
  if (maximum || operation.base == "MinOps" || operation.base == "ArgMinOps") {
    Reduction found{*from, *to, 8, 16, maximum ? -infinity : infinity, maximum ? greatest : least, same, true};
    return found;
  }
  return {};
}

struct Shape {
  int inputs, results;
  Offsets of_inputs, of_results;
  char *from, *to, *place;
};

void reduce(const Reduction& reduction, const Shape& shape, Writes& writes) {
  std::vector<int64_t> places(shape.inputs);
  for (int i = 0; i < shape.inputs; i++) shape.of_inputs.at(i, &places[i]);
  for (int result = 0; result < shape.results; result++) {
    int64_t at[2];
    shape.of_results.at(result, at);
    double found = reduction.first;
    int place = 0;
    for (int i = 0; i < shape.inputs; i++) {
      double value = load(reduction.from, shape.from + at[1] + places[i]);
      double next = reduction.add(found, value);
      bool better = next != found || (i == 0 && reduction.finds_place);
      if (std::isnan(found) && i > 0) better = false;
      if (better) place = i;
      found = next;
    }
    int64_t width = static_cast<int64_t>(width_of(reduction.to));
    if (reduction.finds_place && !shape.place) {
      writes.put(shape.to + at[0], Type::int64, place);
      continue;
    }
    writes.put(shape.to + at[0], reduction.to, reduction.finish(found));
    if (shape.place) writes.put(shape.place + at[0] / width * 8, Type::int64, place);
  }
}

}  // namespace

// The one argument: the operation, its neutral element, how blocks share the work, offsets, and addresses.
Work reduction(const Launch& launch) {
  if (launch.parts.base != "reduce_kernel") return {};
  std::vector<std::string> given = take_apart(launch.parts.arguments[2]).arguments;
  if (given.size() < 4 || given[2] != "unsigned int") return {};
  auto* object = static_cast<const char*>(launch.arguments[0]);
  auto found = reduction_of(given, object);
  if (!found) return {};
  auto aligned = [](size_t at, size_t alignment) { return (at + alignment - 1) / alignment * alignment; };
  size_t alignment = std::min<size_t>(found->neutral, 8);
  const char* config = object + aligned(aligned(found->object, alignment) + found->neutral, 4);
  constexpr size_t config_bytes = 64;
  const char* inputs = config + config_bytes;
  const char* results = inputs + Offsets::size_of(1);
  size_t end = results + Offsets::size_of(2) - object;
  const char* addresses = object + aligned(end, 8);
  Shape shape{read<int>(config + 4), read<int>(config + 8), Offsets::of(inputs, 1), Offsets::of(results, 2),
              read<char*>(addresses), read<char*>(addresses + 8), nullptr};
  // Behind the source and two results lie three addresses of work space and a number.
  auto* rest = addresses + 3 * 8;
  bool accumulates = read<char>(rest + 4 * 8), is_final = read<char>(rest + 4 * 8 + 1);
  if (accumulates || !is_final || read<char*>(rest)) return {};
  if (found->finds_place && read<int>(rest + 4 * 8 + 4) == 2) shape.place = read<char*>(addresses + 16);
  return [=](Writes& writes) { reduce(*found, shape, writes); };
}

}  // namespace compute
