// How long kernels take alone.
#include <cxxabi.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <regex>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "settings.h"
#include "simulation.h"

namespace simulation {
namespace {

struct Rule {
  std::regex pattern;
  double duration_ns;
};

// "PATTERN=MICROSECONDS;...": the first pattern that a kernel's name holds counts.
std::vector<Rule> read_rules() {
  std::vector<Rule> found;
  const char* given = getenv("SIMGPU_RULES");
  std::istringstream parts(given ? given : "");
  for (std::string part; std::getline(parts, part, ';');) {
    size_t equals = part.rfind('=');
    if (equals == std::string::npos) continue;
    found.push_back({std::regex(part.substr(0, equals)), 1e3 * atof(part.c_str() + equals + 1)});
  }
  return found;
}

}  // namespace

std::string demangled(const std::string& name) {
  int status = 0;
  char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string found = plain ? plain : name;
  free(plain);
  return found;
}

double duration_by_rule(const std::string& name, double otherwise) {
  static const std::vector<Rule>& rules = *new std::vector<Rule>(read_rules());
  if (rules.empty()) return otherwise;
  // Names are few and launches many: each name is looked up once.
  static std::mutex& lock = *new std::mutex;
  static auto& known = *new std::unordered_map<std::string, double>;
  std::lock_guard<std::mutex> held(lock);
  auto entry = known.find(name);
  if (entry == known.end()) {
    std::string plain = demangled(name);
    double duration_ns = -1;
    for (const Rule& rule : rules) {
      if (!std::regex_search(plain, rule.pattern)) continue;
      duration_ns = rule.duration_ns;
      break;
    }
    entry = known.emplace(name, duration_ns).first;
  }
  return entry->second >= 0 ? entry->second : otherwise;
}

double product_ns(const std::string& type, double flop) {
  const auto& rates = settings().flop_per_ns;
  auto rate = rates.find(type);
  if (rate == rates.end() && type == "tf32") rate = rates.find("f32");
  if (rate == rates.end()) rate = rates.find("");
  double flop_per_ns = rate == rates.end() ? 100 : rate->second;
  return settings().kernel_ns + flop / flop_per_ns;
}

double waves(const Task& task, int multiprocessors) {
  double threads = static_cast<double>(task.block[0]) * task.block[1] * task.block[2];
  double resident = task.shared_bytes > 32768 ? 1 : std::max(1.0, std::floor(2048 / std::max(64.0, threads)));
  double blocks = static_cast<double>(task.grid[0]) * task.grid[1] * task.grid[2];
  return std::ceil(blocks / (multiprocessors * resident));
}

}  // namespace simulation
