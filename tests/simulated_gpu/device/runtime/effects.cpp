// The few kernels that compute. All others take their time and leave memory as it is.
//
// What is here is what control flow on the host depends on: fills, the arithmetic on int64 with which torch's object
// collectives lay out their messages, and zeros for single numbers that are not computed, so that a check for overflow
// finds none in what happens to lie in memory. The layouts of arguments are those of torch 2.13.
#include <algorithm>
#include <cstring>
#include <regex>
#include <vector>

#include "runtime.h"

namespace runtime {
namespace {

bool holds(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

bool is_on_device(const void* address) {
  Block block = block_at(address);
  return block.size && !block.on_host;
}

// Element-wise kernels over contiguous tensors: arguments are the count, the functor, and an array of pointers.
bool is_contiguous_elementwise(const std::string& name) {
  return holds(name, "vectorized_elementwise_kernel") || holds(name, "unrolled_elementwise_kernel");
}

// Bytes of a type by the letter of its mangled name; 0 if it is another.
size_t width_of(const char* mangled) {
  if (!strncmp(mangled, "N3c108BFloat16E", 15) || !strncmp(mangled, "N3c104HalfE", 11)) return 2;
  switch (*mangled) {
    case 'b':
    case 'a':
    case 'h': return 1;
    case 's':
    case 't': return 2;
    case 'i':
    case 'j':
    case 'f': return 4;
    case 'l':
    case 'm':
    case 'x':
    case 'y':
    case 'd': return 8;
    default: return 0;
  }
}

Effect fill(const std::string& name, void** arguments) {
  size_t at = name.find("FillFunctorI");
  size_t width = at == std::string::npos ? 0 : width_of(name.c_str() + at + strlen("FillFunctorI"));
  if (!width) return {};
  size_t count = *static_cast<int*>(arguments[0]);
  auto* value = static_cast<char*>(arguments[1]);
  char* to = *static_cast<char**>(arguments[2]);
  std::vector<char> one(value, value + width);
  bool is_zero = std::all_of(one.begin(), one.end(), [](char byte) { return byte == 0; });
  return {[=] {
            if (is_zero) memset(to, 0, count * width);
            else
              for (size_t i = 0; i < count; i++) memcpy(to + i * width, one.data(), width);
          },
          count * width};
}

// int64: tensor + tensor, or tensor + number.
Effect add(const std::string& name, void** arguments) {
  bool number = holds(name, "CUDAFunctorOnSelf_addIlE");
  if (!number && !holds(name, "CUDAFunctor_addIlE")) return {};
  int count = *static_cast<int*>(arguments[0]);
  auto* functor = static_cast<int64_t*>(arguments[1]);  // alpha, or the number and alpha
  auto** tensors = static_cast<int64_t**>(arguments[2]);
  int64_t alpha = number ? functor[1] : functor[0], addend = functor[0];
  int64_t *to = tensors[0], *first = tensors[1], *second = number ? nullptr : tensors[2];
  return {[=] {
            for (int i = 0; i < count; i++) to[i] = first[i] + alpha * (number ? addend : second[i]);
          },
          count * sizeof(int64_t)};
}

// int64: one tensor compared with another. The functor is the number of the comparison.
Effect compare(const std::string& name, void** arguments) {
  bool order = holds(name, "CompareFunctorIlE");                                            // >=, >, <=, <
  bool equality = holds(name, "BinaryFunctorIllbN") && holds(name, "CompareEqFunctorIlE");  // ==, !=
  if (!order && !equality) return {};
  int count = *static_cast<int*>(arguments[0]), which = *static_cast<int*>(arguments[1]) + (equality ? 4 : 0);
  auto** tensors = static_cast<char**>(arguments[2]);
  auto* to = reinterpret_cast<bool*>(tensors[0]);
  auto *first = reinterpret_cast<int64_t*>(tensors[1]), *second = reinterpret_cast<int64_t*>(tensors[2]);
  auto holds_for = [which](int64_t a, int64_t b) {
    const bool found[] = {a >= b, a > b, a <= b, a < b, a == b, a != b};
    return found[which];
  };
  return {[=] {
            for (int i = 0; i < count; i++) to[i] = holds_for(first[i], second[i]);
          },
          count * sizeof(int64_t)};
}

// Few numbers at the begin of an allocation are results that the host may ask for, of whatever type.
Effect small_result(void** arguments) {
  constexpr int most = 16, alignment = 512;
  int count = *static_cast<int*>(arguments[0]);
  char* to = *static_cast<char**>(arguments[2]);
  if (count > most || reinterpret_cast<uintptr_t>(to) % alignment || !is_on_device(to)) return {};
  size_t bytes = count * sizeof(int64_t);
  return {[=] { memset(to, 0, bytes); }, bytes};
}

// Source and result in the argument of a reduction: the first two addresses on the device that lie side by side in it;
// single ones are left over from what was on the host's stack before.
bool first_addresses(const char* argument, char* addresses[2]) {
  for (size_t offset = 32; offset < 2000; offset += 8) {
    memcpy(addresses, argument + offset, 2 * sizeof(char*));
    if (is_on_device(addresses[0]) && is_on_device(addresses[1])) return true;
  }
  return false;
}

// A reduction to few numbers: a sum of int64 is computed, all else is zero. The kernel's one argument begins with its
// operation, its neutral element, and the numbers (bytes of an element, inputs, outputs).
Effect reduction(const std::string& name, void** arguments) {
  if (!holds(name, "reduce_kernel")) return {};
  auto* argument = static_cast<char*>(arguments[0]);
  bool is_sum = holds(name, "sum_functorIlll");
  int numbers[3];
  memcpy(numbers, argument + 16, sizeof numbers);
  char* addresses[2];
  if (!first_addresses(argument, addresses)) return {};
  auto *from = reinterpret_cast<int64_t*>(addresses[0]), *to = reinterpret_cast<int64_t*>(addresses[1]);
  if (!is_sum) {
    if (reinterpret_cast<uintptr_t>(to) % 512) return {};
    return {[to] { *to = 0; }, sizeof(int64_t)};
  }
  if (numbers[0] != sizeof(int64_t) || numbers[1] < 1 || numbers[2] != 1) return {};
  int count = numbers[1];
  return {[count, from, to] {
            int64_t total = 0;
            for (int i = 0; i < count; i++) total += from[i];
            *to = total;
          },
          count * sizeof(int64_t)};
}

// How many elements are not zero, for nonzero and masked_select: none.
Effect count(const std::string& name, void** arguments) {
  if (!holds(name, "DeviceReduceSingleTileKernel")) return {};
  char* to = *static_cast<char**>(arguments[1]);
  if (reinterpret_cast<uintptr_t>(to) % 512 || !is_on_device(to)) return {};
  return {[=] { memset(to, 0, sizeof(int64_t)); }, sizeof(int64_t)};
}

// torch.cat along the first dimension, of any type.
Effect cat(const std::string& name, void** arguments, dim3 grid) {
  if (!holds(name, "CatArrayBatchedCopy")) return {};
  static const std::regex& form =
      *new std::regex("CatArrayBatchedCopy\\w*<.*OpaqueType<(\\d+)u>, unsigned int, (\\d+), (\\d+), (\\d+)");
  std::smatch match;
  std::string plain = simulation::demangled(name);
  if (!std::regex_search(plain, match, form)) return {};
  size_t width = std::stoul(match[1]), most = std::stoul(match[3]);
  if (*static_cast<int*>(arguments[3]) != 0) return {};
  char* to = *static_cast<char**>(arguments[0]);
  // Arrays of `most` each: addresses, then offsets, sizes and numbers of elements.
  auto* sources = static_cast<char**>(arguments[1]);
  auto* offsets = reinterpret_cast<unsigned*>(sources + most);
  unsigned* counts = offsets + 2 * most;
  size_t stride = *static_cast<unsigned*>(arguments[4]);
  struct Part {
    char* from;
    size_t at, size;
  };
  std::vector<Part> parts;
  uint64_t bytes = 0;
  for (size_t i = 0; i < std::min<size_t>(grid.y, most); i++) {
    parts.push_back({sources[i], offsets[i] * stride * width, counts[i] * width});
    bytes += parts.back().size;
  }
  return {[=] {
            for (const Part& part : parts) memcpy(to + part.at, part.from, part.size);
          },
          bytes};
}

}  // namespace

Effect effect_of(const std::string& name, void** arguments, dim3 grid) {
  Effect effect;
  if (is_contiguous_elementwise(name)) {
    effect = fill(name, arguments);
    if (!effect.work) effect = add(name, arguments);
    if (!effect.work) effect = compare(name, arguments);
    if (!effect.work) effect = small_result(arguments);
  } else {
    effect = reduction(name, arguments);
    if (!effect.work) effect = count(name, arguments);
    if (!effect.work) effect = cat(name, arguments, grid);
  }
  if (effect.bytes > simulation::settings().most_data_bytes) return {};
  return effect;
}

uint64_t elementwise_bytes(const std::string& name, void** arguments) {
  if (!arguments || !is_contiguous_elementwise(name)) return 0;
  size_t at = name.find("IPcLm");  // at::detail::Array<char*, N>
  uint64_t tensors = at == std::string::npos ? 1 : std::max(1, atoi(name.c_str() + at + 5));
  uint64_t width = holds(name, "BFloat16") || holds(name, "4Half") ? 2 : 4;
  return static_cast<uint64_t>(*static_cast<int*>(arguments[0])) * tensors * width;
}

}  // namespace runtime
