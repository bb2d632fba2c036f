// Faults that a device is to have: SIMGPU_FAULTS="[RANK:]FAULT=VALUE[@POINT=NUMBER];...". Without a rank all have it,
// without a point it is there from the start. tests/simulated_gpu/parameters.py documents each.
#pragma once

#include "settings.h"

namespace simulation {

enum class Fault {
  signal,        // the process gets this signal
  device,        // the device is lost: every call fails with this error of CUDA
  nccl,          // communicators have this error, and none of their collectives begins
  overflow,      // CUPTI keeps so many records between two flushes, and drops the others
  lost_records,  // one of so many records of kernels is lost
  late_records,  // those of the last microseconds before a flush come with the next one
  cupti_held,    // another subscriber holds CUPTI
  sensors,       // NVML's calls fail with this error
};
enum class Point { kernel, collective };

// The value of a fault; 0 where there is none, and until it has come.
EXPORTED int fault(Fault what);
// A kernel or collective begins: faults come with the one of their number, from 1.
void passed(Point point);

}  // namespace simulation
