#include "faults.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <vector>

namespace simulation {
namespace {

constexpr std::array fault_names = {"signal",       "device",       "nccl",       "overflow",
                                    "lost_records", "late_records", "cupti_held", "sensors"};
constexpr std::array point_names = {"kernel", "collective"};

template <size_t count>
int index_of(const std::array<const char*, count>& names, const std::string& name) {
  for (size_t index = 0; index < count; index++)
    if (name == names[index]) return static_cast<int>(index);
  fprintf(stderr, "[simulated GPU] SIMGPU_FAULTS: %s is unknown\n", name.c_str());
  abort();
}

struct Planned {
  int fault, value;
  int point = -1;  // none: from the start
  uint64_t number = 0;
};

class Faults {
 public:
  static Faults& get() {
    static Faults& once = *new Faults;
    return once;
  }
  int value(Fault what) const { return values_[static_cast<size_t>(what)]; }
  void passed(Point point) {
    auto index = static_cast<size_t>(point);
    uint64_t number = ++passed_[index];
    for (const Planned& one : planned_)
      if (one.point == static_cast<int>(index) && one.number == number) come(one);
  }

 private:
  Faults() {
    const char* given = getenv("SIMGPU_FAULTS");
    std::istringstream parts(given ? given : "");
    for (std::string part; std::getline(parts, part, ';');) {
      size_t colon = part.find(':'), at = part.find('@');
      if (colon != std::string::npos && atoi(part.c_str()) != rank_of_process()) continue;
      size_t begin = colon == std::string::npos ? 0 : colon + 1, equals = part.find('=', begin);
      Planned one{index_of(fault_names, part.substr(begin, equals - begin)), atoi(part.c_str() + equals + 1)};
      if (at == std::string::npos) {
        come(one);
        continue;
      }
      equals = part.find('=', at);
      one.point = index_of(point_names, part.substr(at + 1, equals - at - 1));
      one.number = strtoull(part.c_str() + equals + 1, nullptr, 10);
      planned_.push_back(one);
    }
  }
  void come(const Planned& one) {
    values_[one.fault] = one.value;
    if (one.fault == static_cast<int>(Fault::signal)) kill(getpid(), one.value);
  }

  std::vector<Planned> planned_;
  std::array<std::atomic<int>, fault_names.size()> values_{};
  std::array<std::atomic<uint64_t>, point_names.size()> passed_{};
};

}  // namespace

int fault(Fault what) { return Faults::get().value(what); }
void passed(Point point) { Faults::get().passed(point); }

}  // namespace simulation
