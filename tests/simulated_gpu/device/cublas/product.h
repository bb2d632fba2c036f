// Matrix products are kernels of a known duration: their FLOP at the device's rate for their type.
#pragma once

#include <cupti_runtime_cbid.h>
#include <library_types.h>

#include <cmath>
#include <string>

#include "../compute/products.h"
#include "../core/faults.h"
#include "../core/settings.h"
#include "../core/simulation.h"

namespace cublas {

inline std::string type_name(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F: return "f64";
    case CUDA_R_16F: return "f16";
    case CUDA_R_16BF: return "bf16";
    case CUDA_R_8I: return "i8";
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2: return "f8";
    default: return "f32";
  }
}

// The type as kernels that compute know it; none for those they do not.
inline std::optional<compute::Type> number_type(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F: return compute::Type::float32;
    case CUDA_R_64F: return compute::Type::float64;
    case CUDA_R_16F: return compute::Type::half;
    case CUDA_R_16BF: return compute::Type::bfloat16;
    default: return {};
  }
}

// `what` ends the kernel's name: "gemm", "gemm_bias", "gemv". It uses as many multiprocessors as it is told; 0: all.
// Returns whether it is enqueued.
inline bool enqueue_product(void* stream, const std::string& type, const std::string& what, double m, double n,
                            double k, double batch, int multiprocessors = 0, compute::Work work = {}) {
  simulation::ApiCall call(CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_v11060);
  if (simulation::fault(simulation::Fault::device)) return false;
  constexpr double tile = 128;
  auto task = std::make_shared<simulation::Task>();
  task->name = "simulated_sm90_" + type + "_" + what + "_tile128x128";
  task->grid[0] = static_cast<int>(std::ceil(m / tile));
  task->grid[1] = static_cast<int>(std::ceil(n / tile));
  task->grid[2] = static_cast<int>(batch);
  task->block[0] = 256;
  task->shared_bytes = 131072;  // one block on a multiprocessor
  double alone_ns = simulation::product_ns(type, 2 * m * n * k * batch);
  task->alone_ns = simulation::duration_by_rule(task->name, alone_ns) * simulation::settings().compute_factor;
  if (multiprocessors) {
    task->multiprocessors = multiprocessors;
    task->alone_ns *=
        simulation::waves(*task, multiprocessors) / simulation::waves(*task, simulation::settings().multiprocessors);
  }
  if (work && simulation::settings().computes) compute::attach(*task, std::move(work));
  return simulation::enqueue(stream, std::move(task)) == 0;
}

}  // namespace cublas
