// Checks for overflow that look at memory: those of torch's GradScaler and of DeepSpeed's ZeRO. Only where the device
// is told so: other kernels leave memory as it is, so gradients must begin as zeros, not as what lay there before.
//
// What a check is made of: casts and products by which gradients get to where they are looked at, the least and the
// greatest number, comparisons, torch's own check of many tensors, and the update of the scale. The layouts of
// arguments are those of torch 2.13.
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "../core/numbers.h"
#include "runtime.h"

namespace runtime {
namespace {

using simulation::BFloat16;
using simulation::Half;

// torch's numbers of types.
enum class Type : int8_t {
  uint8 = 0,
  int32 = 3,
  int64 = 4,
  half = 5,
  float32 = 6,
  float64 = 7,
  boolean = 11,
  bfloat16 = 15
};

size_t width_of(Type type) {
  switch (type) {
    case Type::uint8:
    case Type::boolean: return 1;
    case Type::half:
    case Type::bfloat16: return 2;
    case Type::int64:
    case Type::float64: return 8;
    default: return 4;
  }
}

template <class Number>
Number read(const char* from) {
  Number value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class Number>
void write(char* to, Number value) {
  memcpy(to, &value, sizeof value);
}

double load(Type type, const char* from) {
  switch (type) {
    case Type::uint8:
    case Type::boolean: return read<uint8_t>(from);
    case Type::int32: return read<int32_t>(from);
    case Type::int64: return static_cast<double>(read<int64_t>(from));
    case Type::half: return Half::widen(read<Half>(from));
    case Type::bfloat16: return BFloat16::widen(read<BFloat16>(from));
    case Type::float32: return read<float>(from);
    default: return read<double>(from);
  }
}

void store(Type type, char* to, double value) {
  switch (type) {
    case Type::uint8: return write(to, static_cast<uint8_t>(value));
    case Type::boolean: return write(to, static_cast<uint8_t>(value != 0));
    case Type::int32: return write(to, static_cast<int32_t>(value));
    case Type::int64: return write(to, static_cast<int64_t>(value));
    case Type::half: return write(to, Half::narrow(static_cast<float>(value)));
    case Type::bfloat16: return write(to, BFloat16::narrow(static_cast<float>(value)));
    case Type::float32: return write(to, static_cast<float>(value));
    default: return write(to, value);
  }
}

// The type at a place of a mangled name. A class that the name had before is a number there: it is the first float of 16
// bits in the name, as no kernel here has both.
std::optional<Type> type_at(const std::string& name, size_t at) {
  const char* mangled = name.c_str() + at;
  if (*mangled == 'S') mangled = strstr(name.c_str(), "N3c10");
  if (!mangled) return {};
  if (!strncmp(mangled, "N3c104HalfE", 11)) return Type::half;
  if (!strncmp(mangled, "N3c108BFloat16E", 15)) return Type::bfloat16;
  switch (*mangled) {
    case 'b': return Type::boolean;
    case 'h': return Type::uint8;
    case 'i': return Type::int32;
    case 'l': return Type::int64;
    case 'f': return Type::float32;
    case 'd': return Type::float64;
    default: return {};
  }
}

// The type that follows `pattern` in a name; none if the name does not have it.
std::optional<Type> type_after(const std::string& name, const char* pattern) {
  size_t at = name.find(pattern);
  return at == std::string::npos ? std::nullopt : type_at(name, at + strlen(pattern));
}

bool holds(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

using Function = std::function<double(double, double)>;

double equal(double a, double b) { return double(a == b); }
double unequal(double a, double b) { return double(a != b); }
double both(double a, double b) { return double(a != 0 && b != 0); }

struct Elementwise {
  Function function;
  int inputs;
  Type from, to;
};

// What an element-wise kernel computes of its inputs, if it is one of a check. `functor` is its second argument.
std::optional<Elementwise> elementwise(const std::string& name, const char* functor) {
  if (auto type = type_after(name, "10AbsFunctorI"))
    return Elementwise{[](double a, double) { return std::fabs(a); }, 1, *type, *type};
  if (auto type = type_after(name, "16CompareEqFunctorI")) {
    Function compare = read<int>(functor) == 0 ? equal : unequal;  // by torch's number
    if (holds(name, "13BinaryFunctorI"))
      return Elementwise{compare, 2, *type, Type::boolean};
    // One side is a number, which lies behind the comparison's own.
    double number = load(*type, functor + std::max<size_t>(4, width_of(*type)));
    return Elementwise{[=](double a, double) { return compare(a, number); }, 1, *type, Type::boolean};
  }
  // By a number, as DDP divides gradients while it puts them into a bucket.
  if (auto type = type_after(name, "UnaryFunctorI"); type && holds(name, "10MulFunctorI")) {
    Type wide = *type == Type::float64 ? Type::float64 : Type::float32;
    double number = load(wide, functor + std::max<size_t>(4, width_of(wide)));
    return Elementwise{[=](double a, double) { return a * number; }, 1, *type, *type};
  }
  if (holds(name, "MulFunctorIbE") || holds(name, "logical_and_kernel_cuda") || holds(name, "BitwiseAndFunctorIbE"))
    return Elementwise{both, 2, Type::boolean, Type::boolean};
  if (holds(name, "logical_not_kernel_cuda"))
    return Elementwise{[](double a, double) { return double(a == 0); }, 1, Type::boolean, Type::boolean};
  if (holds(name, "direct_copy_kernel_cuda")) return Elementwise{[](double a, double) { return a; }, 1, {}, {}};
  if (holds(name, "bfloat16_copy_kernel_cuda"))
    return Elementwise{[](double a, double) { return a; }, 1, Type::float32, Type::bfloat16};
  if (holds(name, "float16_copy_kernel_cuda"))
    return Elementwise{[](double a, double) { return a; }, 1, Type::float32, Type::half};
  if (auto type = type_after(name, "15CUDAFunctor_addI")) {
    double alpha = load(*type, functor);
    return Elementwise{[=](double a, double b) { return a + alpha * b; }, 2, *type, *type};
  }
  return {};
}

Effect elementwise_effect(const std::string& name, void** arguments) {
  bool contiguous = holds(name, "vectorized_elementwise_kernel"), unrolled = holds(name, "unrolled_elementwise_kernel");
  if (!contiguous && !unrolled) return {};
  auto kind = elementwise(name, static_cast<char*>(arguments[1]));
  if (!kind) return {};
  int64_t count = *static_cast<int*>(arguments[0]);
  auto** tensors = static_cast<char**>(arguments[2]);  // the result, then the inputs
  Type to = kind->to, from[2] = {kind->from, kind->from};
  // With casts, what loads and what stores have the types of the tensors.
  if (holds(name, "12LoadWithCastI")) {
    for (int i = 0; i < kind->inputs; i++) from[i] = static_cast<Type*>(arguments[5])[i];
    to = *static_cast<Type*>(arguments[6]);
  } else if (holds(name, "direct_copy_kernel_cuda")) {
    return {};
  }
  char *result = tensors[0], *first = tensors[1], *second = kind->inputs == 2 ? tensors[2] : tensors[1];
  Function function = kind->function;
  Type one = from[0], other = kind->inputs == 2 ? from[1] : from[0];
  return {[=] {
            for (int64_t i = 0; i < count; i++)
              store(to, result + i * width_of(to),
                    function(load(one, first + i * width_of(one)), load(other, second + i * width_of(other))));
          },
          count * width_of(to)};
}

// The least or the greatest of all numbers; NaN if one is. The kernel's one argument begins with an empty operation,
// its neutral element, and the numbers (bytes of an element, inputs, outputs).
Effect extreme(const std::string& name, void** arguments) {
  auto greatest = type_after(name, "13MaxNanFunctorI"), least = type_after(name, "13MinNanFunctorI");
  if (!holds(name, "reduce_kernel") || (!greatest && !least)) return {};
  Type type = greatest ? *greatest : *least;
  auto* argument = static_cast<char*>(arguments[0]);
  size_t width = width_of(type);
  const char* numbers = argument + (2 * width + 3) / 4 * 4;
  int count = read<int>(numbers + 4), results = read<int>(numbers + 8);
  char* addresses[2];
  if (results != 1 || !first_addresses(argument, addresses)) return {};
  return {[=, from = addresses[0], to = addresses[1]] {
            double found = load(type, from);
            for (int i = 1; i < count; i++) {
              double value = load(type, from + i * width);
              if (std::isnan(found) || std::isnan(value)) found = NAN;
              else found = greatest ? std::max(found, value) : std::min(found, value);
            }
            store(type, to, found);
          },
          count * width};
}

// torch's check of many tensors at once. It also takes the scale off, which is not done here.
Effect many_tensors(const std::string& name, void** arguments, dim3 grid) {
  constexpr int most_tensors = 770;
  if (!holds(name, "amp_foreach_non_finite_check_and_unscale")) return {};
  auto type = type_after(name, "14UnaryOpFunctorI");
  if (!type || !holds(name, "18TensorListMetadataILi1E")) return {};
  // Addresses, sizes, and for each block the tensor that it looks at.
  auto* list = static_cast<char*>(arguments[0]);
  auto** addresses = reinterpret_cast<char**>(list);
  auto* sizes = reinterpret_cast<int64_t*>(list + most_tensors * sizeof(char*));
  auto* tensor_of = reinterpret_cast<uint16_t*>(sizes + most_tensors);
  auto* found = *static_cast<float**>(arguments[2]);
  std::vector<std::pair<char*, int64_t>> tensors;
  uint64_t bytes = 0;
  for (unsigned block = 0, last = most_tensors; block < grid.x; block++) {
    if (tensor_of[block] == last) continue;
    last = tensor_of[block];
    tensors.emplace_back(addresses[last], sizes[last]);
    bytes += sizes[last] * width_of(*type);
  }
  return {[=] {
            for (auto& [at, size] : tensors)
              for (int64_t i = 0; i < size; i++)
                if (!std::isfinite(load(*type, at + i * width_of(*type)))) *found = 1;
          },
          bytes};
}

Effect scale_update(const std::string& name, void** arguments) {
  if (!holds(name, "amp_update_scale_cuda_kernel")) return {};
  auto* scale = *static_cast<float**>(arguments[0]);
  auto* steps = *static_cast<int**>(arguments[1]);
  auto* found = *static_cast<const float**>(arguments[2]);
  double growth = *static_cast<double*>(arguments[3]), backoff = *static_cast<double*>(arguments[4]);
  int interval = *static_cast<int*>(arguments[5]);
  return {[=] {
            if (*found != 0) {
              *scale = static_cast<float>(*scale * backoff);
              *steps = 0;
            } else if (++*steps == interval) {
              *scale = static_cast<float>(*scale * growth);
              *steps = 0;
            }
          },
          sizeof(float)};
}

}  // namespace

Effect overflow_check(const std::string& name, void** arguments, dim3 grid) {
  Effect effect = elementwise_effect(name, arguments);
  if (!effect.work) effect = extreme(name, arguments);
  if (!effect.work) effect = many_tensors(name, arguments, grid);
  if (!effect.work) effect = scale_update(name, arguments);
  return effect;
}

}  // namespace runtime
