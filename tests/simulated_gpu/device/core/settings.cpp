#include "settings.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace simulation {
namespace {

std::string text(const char* name, const std::string& otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

double number(const char* name, double otherwise) {
  const char* value = getenv(name);
  return value && *value ? atof(value) : otherwise;
}

// "f32=0.1,bf16=0.2" or one number for all types; in TFLOP/s, which is 1000 FLOP/ns.
std::map<std::string, double> rates(const std::string& given) {
  std::map<std::string, double> found;
  std::istringstream parts(given);
  for (std::string part; std::getline(parts, part, ',');) {
    size_t equals = part.find('=');
    std::string type = equals == std::string::npos ? "" : part.substr(0, equals);
    found[type] = 1e3 * atof(part.c_str() + (equals == std::string::npos ? 0 : equals + 1));
  }
  return found;
}

Settings read() {
  Settings s;
  s.devices = static_cast<int>(number("SIMGPU_DEVICES", 2));
  s.memory_bytes = static_cast<size_t>(number("SIMGPU_MEMORY_GIB", 16) * (1 << 30));
  s.multiprocessors = static_cast<int>(number("SIMGPU_MULTIPROCESSORS", 132));
  std::string memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  s.folder = text("SIMGPU_FOLDER", memory + "/simulated-gpu-" + std::to_string(getuid()));
  mkdir(s.folder.c_str(), 0700);
  s.log = text("SIMGPU_LOG", "");
  s.stall_s = number("SIMGPU_STALL_S", 0);

  s.launch_ns = 1e3 * number("SIMGPU_LAUNCH_US", 5);
  s.kernel_ns = 1e3 * number("SIMGPU_KERNEL_US", 10);
  s.block_ns = 1e3 * number("SIMGPU_BLOCK_US", 0.01);
  s.memory_bytes_per_ns = number("SIMGPU_MEMORY_GBS", 1000);
  s.host_link_bytes_per_ns = number("SIMGPU_HOST_LINK_GBS", 20);
  s.flop_per_ns = rates(text("SIMGPU_TFLOPS", "0.1"));

  s.compute_slowdown = std::max(1.0, number("SIMGPU_COMPUTE_SLOWDOWN", 1));
  // Ranks rely on it that a collective never takes less than its time alone: see Simulation::advance.
  s.communication_slowdown = std::max(1.0, number("SIMGPU_COMMUNICATION_SLOWDOWN", 1));
  s.channels_take_multiprocessors = number("SIMGPU_CHANNELS_TAKE_SMS", 0) != 0;
  int slow_rank = -1;
  double slow_factor = 1;
  if (sscanf(text("SIMGPU_SLOW_RANK", "").c_str(), "%d:%lf", &slow_rank, &slow_factor) != 2) slow_rank = -1;
  s.compute_factor = slow_rank >= 0 && slow_rank == rank_of_process() ? slow_factor : 1;

  s.channels = static_cast<int>(number("SIMGPU_CHANNELS", 16));
  s.collective_ns = std::max(1.0, 1e3 * number("SIMGPU_COLLECTIVE_US", 100));
  s.link_bytes_per_ns = number("SIMGPU_LINK_GBS", 1);
  s.slow_link[0] = s.slow_link[1] = -1;
  s.slow_link_factor = 1;
  sscanf(text("SIMGPU_SLOW_LINK", "").c_str(), "%d-%d:%lf", &s.slow_link[0], &s.slow_link[1], &s.slow_link_factor);
  s.most_data_bytes = static_cast<size_t>(number("SIMGPU_MOST_DATA_BYTES", 1e18));
  s.computes = number("SIMGPU_COMPUTES", 0) != 0;
  s.traces = !text("SIMGPU_TRACE", "").empty();

  s.power_cap_w = number("SIMGPU_POWER_CAP_W", 700);
  s.idle_w = number("SIMGPU_IDLE_W", 70);
  s.compute_w = number("SIMGPU_COMPUTE_W", 500);
  s.communication_w = number("SIMGPU_COMMUNICATION_W", 60);
  s.compute_memory = number("SIMGPU_COMPUTE_MEMORY", 0.3);
  s.communication_memory = number("SIMGPU_COMMUNICATION_MEMORY", 0.1);
  s.power_constant_ns = 1e6 * number("SIMGPU_POWER_CONSTANT_MS", 20);
  return s;
}

}  // namespace

int rank_of_process() { return static_cast<int>(number("RANK", -1)); }

const Settings& settings() {
  static const Settings& once = *new Settings(read());
  return once;
}

}  // namespace simulation
