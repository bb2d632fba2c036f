// Element-wise kernels: over contiguous tensors, with casts, and over tensors of any strides.
#include <algorithm>

#include "compute.h"
#include "functors.h"
#include "offsets.h"

namespace compute {
namespace {

constexpr int chunk = 512;

struct Operands {
  Functor functor;
  int64_t count;
  std::vector<char*> tensors;  // the result, then the inputs
  std::vector<Type> types;
  Offsets offsets;
};

void move(const Operands& all, Writes& writes) {
  size_t width = width_of(all.types[0]);
  if (all.offsets.are_trivial()) return writes.put(all.tensors[0], all.tensors[1], all.count * width);
  int64_t at[Offsets::most];
  for (int64_t i = 0; i < all.count; i++) {
    all.offsets.at(i, at);
    writes.put(all.tensors[0] + at[0], all.tensors[1] + at[1], width);
  }
}

void compute(const Operands& all, Writes& writes) {
  if (all.functor.moves && all.types[0] == all.types[1]) return move(all, writes);
  size_t inputs = all.functor.inputs.size(), width = width_of(all.types[0]);
  double values[Offsets::most][chunk], results[chunk];
  const double* rows[Offsets::most];
  char bytes[chunk * 8];
  char* targets[chunk];
  for (size_t k = 0; k < inputs; k++) rows[k] = values[k];
  for (int64_t from = 0; from < all.count; from += chunk) {
    int count = static_cast<int>(std::min<int64_t>(chunk, all.count - from));
    if (all.offsets.are_trivial()) {
      for (size_t k = 0; k < inputs; k++) {
        Type type = all.types[k + 1];
        auto size = static_cast<int64_t>(width_of(type));
        load_many(type, all.tensors[k + 1] + from * size, size, count, values[k]);
      }
    } else {
      int64_t at[Offsets::most];
      for (int i = 0; i < count; i++) {
        all.offsets.at(from + i, at);
        targets[i] = all.tensors[0] + at[0];
        for (size_t k = 0; k < inputs; k++) values[k][i] = load(all.types[k + 1], all.tensors[k + 1] + at[k + 1]);
      }
    }
    // A tensor of another type is first cast to what the function takes.
    for (size_t k = 0; k < inputs; k++) {
      if (all.types[k + 1] == all.functor.inputs[k]) continue;
      store_many(all.functor.inputs[k], bytes, values[k], count);
      load_many(all.functor.inputs[k], bytes, static_cast<int64_t>(width_of(all.functor.inputs[k])), count, values[k]);
    }
    all.functor.function(results, rows, count);
    if (all.types[0] != all.functor.result) {
      store_many(all.functor.result, bytes, results, count);
      load_many(all.functor.result, bytes, static_cast<int64_t>(width_of(all.functor.result)), count, results);
    }
    store_many(all.types[0], bytes, results, count);
    if (all.offsets.are_trivial()) {
      writes.put(all.tensors[0] + from * static_cast<int64_t>(width), bytes, count * width);
    } else {
      for (int i = 0; i < count; i++) writes.put(targets[i], bytes + i * width, width);
    }
  }
}

void set_own_types(Operands& all) {
  all.types = {all.functor.result};
  all.types.insert(all.types.end(), all.functor.inputs.begin(), all.functor.inputs.end());
}

Work work(Operands all) {
  return [all = std::move(all)](Writes& writes) { compute(all, writes); };
}

void set_tensors(Operands& all, const char* array) {
  for (size_t i = 0; i <= all.functor.inputs.size(); i++)
    all.tensors.push_back(read<char*>(array + i * sizeof(char*)));
}

// The arguments are the count, the functor, the tensors' addresses, and with casts what loads and what stores.
Work contiguous(const Launch& launch, const std::string& name, bool casts) {
  auto found = functor(name, static_cast<const char*>(launch.arguments[1]));
  if (!found) return {};
  Operands all{*found, launch.argument<int>(0), {}, {}, {}};
  set_tensors(all, static_cast<const char*>(launch.arguments[2]));
  set_own_types(all);
  if (casts) {
    size_t inputs = all.functor.inputs.size();
    for (size_t k = 0; k < inputs; k++) all.types[k + 1] = static_cast<Type*>(launch.arguments[5])[k];
    all.types[0] = *static_cast<Type*>(launch.arguments[6]);
  }
  return work(std::move(all));
}

// The second argument is a lambda of torch's loops: it holds offsets, addresses, the functor, and with casts types.
Work strided(const Launch& launch) {
  const std::string& name = launch.parts.arguments[2];
  bool casts = true;
  std::vector<std::string> inner = arguments_of("gpu_kernel_impl", name);
  if (inner.empty()) {
    casts = false;
    inner = arguments_of("gpu_kernel_impl_nocast", name);
  }
  if (inner.empty()) return {};
  auto* object = static_cast<const char*>(launch.arguments[1]);
  // How many tensors there are is known with the functor, whose place depends on how many there are.
  for (int tensors = 1; tensors <= 4; tensors++) {
    size_t at = (Offsets::size_of(tensors) + 7) / 8 * 8;
    const char* members = object + at + tensors * sizeof(char*);
    auto found = functor(inner[0], members);
    if (!found) return {};
    if (static_cast<int>(found->inputs.size()) + 1 != tensors) continue;
    Operands all{*found, launch.argument<int>(0), {}, {}, Offsets::of(object, tensors)};
    set_tensors(all, object + at);
    set_own_types(all);
    if (casts) {
      for (int i = 0; i < tensors; i++) all.types[i] = read<Type>(members + found->size + i);
    }
    return work(std::move(all));
  }
  return {};
}

}  // namespace

Work elementwise(const Launch& launch) {
  const std::vector<std::string>& given = launch.parts.arguments;
  if (launch.parts.base == "vectorized_elementwise_kernel") return contiguous(launch, given[1], false);
  if (launch.parts.base == "unrolled_elementwise_kernel")
    return contiguous(launch, given[0], launch.name.find("LoadWithCast") != std::string::npos);
  if (launch.parts.base == "elementwise_kernel") return strided(launch);
  return {};
}

}  // namespace compute
