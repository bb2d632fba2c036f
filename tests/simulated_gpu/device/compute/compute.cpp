#include "compute.h"

#include <mutex>
#include <unordered_map>

namespace compute {
namespace {

struct Known {
  std::string name;
  Template parts;
};

// Names are few and launches many: each is taken apart once.
const Known& known(const std::string& mangled) {
  static std::mutex& lock = *new std::mutex;
  static auto& names = *new std::unordered_map<std::string, Known>;
  std::lock_guard<std::mutex> held(lock);
  auto entry = names.find(mangled);
  if (entry == names.end()) {
    std::string name = plain_name(mangled);
    entry = names.emplace(mangled, Known{name, take_apart(name)}).first;
  }
  return entry->second;
}

// torch.cuda._sleep, and what only prepares the counters of others.
bool does_nothing(const std::string& base) { return base == "spin_kernel"; }

}  // namespace

Work work_of(const std::string& mangled, void** arguments, dim3 grid, dim3 block) {
  const Known& kernel = known(mangled);
  Launch launch{kernel.name, kernel.parts, arguments, grid, block};
  if (does_nothing(kernel.parts.base)) return [](Writes&) {};
  for (auto family :
       {elementwise, reduction, many_tensors, softmax, norm, loss, rows, indexing, scatter, placement, attention,
        random_numbers}) {
    if (Work work = family(launch)) return work;
  }
  return {};
}

}  // namespace compute
