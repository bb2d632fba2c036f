// What the simulated device is told by environment variables. tests/simulated_gpu/parameters.py documents each of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#define EXPORTED __attribute__((visibility("default")))

namespace simulation {

struct Settings {
  int devices;
  size_t memory_bytes;
  int multiprocessors;
  std::string folder;  // where the processes of a job meet
  std::string log;     // begins the names of the log files; empty: no log
  double stall_s;      // tell what stands in the queues when nothing moves for so long; 0: never

  double launch_ns;  // from the call of the host to the earliest start on an idle stream
  double kernel_ns, block_ns;
  double memory_bytes_per_ns, host_link_bytes_per_ns;
  std::map<std::string, double> flop_per_ns;  // by type of the factors: f32, tf32, bf16, ...

  double compute_slowdown, communication_slowdown;  // factors of duration while the other class is in flight
  double compute_factor;                            // of this rank's compute kernels: a slow rank
  bool channels_take_multiprocessors;

  int channels;
  double collective_ns, link_bytes_per_ns;
  int slow_link[2];         // ranks at its two ends; -1: none
  double slow_link_factor;  // of its bandwidth
  size_t most_data_bytes;   // larger messages take their time, but move nothing
  bool computes;            // kernels do
  bool traces;              // tell what is missing

  double power_cap_w, idle_w, compute_w, communication_w;  // cap 0: no power model, full clock
  double power_constant_ns;
  double compute_memory, communication_memory;  // shares of the memory's bandwidth
};

// Read at first use, not when the library is loaded: ranks are forked from a process that has it loaded already.
EXPORTED const Settings& settings();

// The rank of this process by its environment, -1 without one.
EXPORTED int rank_of_process();

}  // namespace simulation
