// The log of what the devices did. tests/simulated_gpu/truth.py reads it.
#include <unistd.h>

#include "engine.h"

namespace simulation {
namespace {

FILE* open_log() {
  if (settings().log.empty()) return nullptr;
  std::string path = settings().log + "." + std::to_string(getpid()) + ".tsv";
  FILE* file = fopen(path.c_str(), "w");
  if (!file) {
    perror(path.c_str());
    return nullptr;
  }
  setvbuf(file, nullptr, _IOFBF, 1 << 20);
  fprintf(file, "class\tkind\tdevice\tstream\tenqueued\tstart\tmet\tend\talone_ns\tclock\twatts\tjoules\tmemory_s\tmultiprocessors_s\t"
          "correlation\tname\n");
  return file;
}

FILE* log_file() {
  static FILE* once = open_log();
  return once;
}

}  // namespace

void log_task(const Task& task, int device, uint32_t stream) {
  static const char* const classes[] = {"compute", "communication", "copy", "none"};
  static const char* const kinds[] = {"kernel", "collective", "memcpy", "memset", "record", "wait", "host"};
  FILE* file = log_file();
  if (!file) return;
  const PowerModel& power = Simulation::get().device(device).power;
  const PowerModel::State& state = power.state();
  fprintf(file, "%s\t%s\t%d\t%u\t%lld\t%lld\t%lld\t%lld\t%.1f\t%.4f\t%.3f\t%.6f\t%.9f\t%.9f\t%u\t%.200s\n",
          classes[static_cast<int>(task.task_class)], kinds[static_cast<int>(task.kind)], device, stream,
          static_cast<long long>(task.enqueued), static_cast<long long>(task.start), static_cast<long long>(task.met),
          static_cast<long long>(task.end), task.alone_ns, power.clock(), state.watts, state.joules, state.memory_s,
          state.multiprocessors_s, task.correlation, demangled(task.name).c_str());
}

void flush_log() {
  if (FILE* file = log_file()) fflush(file);
}

}  // namespace simulation
