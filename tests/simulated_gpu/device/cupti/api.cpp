// CUPTI's activity interface, as far as torch's profiler uses it.
#include <iterator>

#include "../core/faults.h"
#include "records.h"

using cupti::Records;

namespace {

// The external ids of this thread, the innermost last: torch's operators, by which it finds the launch of a kernel.
thread_local std::vector<std::pair<uint32_t, uint64_t>> external_ids;

const simulation::Profiler profiler = {
    [](const simulation::Task& task) { return Records::get().wants(task); },
    [](uint32_t correlation) { Records::get().call_begins(correlation, external_ids); },
    [](const simulation::Call& call) { Records::get().call_ended(call); },
    [](const simulation::Task& task, int device, uint32_t stream) { Records::get().task_ended(task, device, stream); },
};

struct Loaded {
  Loaded() { simulation::set_profiler(&profiler); }
} const loaded;

// What calls return while another subscriber, such as Nsight Systems, holds CUPTI.
CUptiResult held() {
  return simulation::fault(simulation::Fault::cupti_held) ? CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
                                                          : CUPTI_SUCCESS;
}

CUptiResult set(CUpti_ActivityKind kind, bool on) {
  if (CUptiResult refused = on ? held() : CUPTI_SUCCESS) return refused;
  if (bool* found = Records::get().switch_of(kind)) *found = on;
  return CUPTI_SUCCESS;
}

}  // namespace

extern "C" {

EXPORTED CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
  *text = "result of the simulated CUPTI";
  return CUPTI_SUCCESS;
}

EXPORTED CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  if (CUptiResult refused = held()) return refused;
  static char only;
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(&only);
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
EXPORTED CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) { return CUPTI_SUCCESS; }
EXPORTED CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }

EXPORTED CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t id, const char** name) {
  if (domain != CUPTI_CB_DOMAIN_RUNTIME_API) {
    *name = id == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx ? "cuLaunchKernelEx"
                                                           : cupti::lasting("cuCall" + std::to_string(id));
    return CUPTI_SUCCESS;
  }
  switch (id) {
    case CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000: *name = "cudaLaunchKernel_v7000"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_v11060: *name = "cudaLaunchKernelExC_v11060"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020: *name = "cudaMemcpyAsync_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020: *name = "cudaMemsetAsync_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020: *name = "cudaDeviceSynchronize_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020: *name = "cudaStreamSynchronize_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020: *name = "cudaEventSynchronize_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaEventRecord_v3020: *name = "cudaEventRecord_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamWaitEvent_v3020: *name = "cudaStreamWaitEvent_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMalloc_v3020: *name = "cudaMalloc_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaFree_v3020: *name = "cudaFree_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamBeginCapture_v10000: *name = "cudaStreamBeginCapture_v10000"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamEndCapture_v10000: *name = "cudaStreamEndCapture_v10000"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000: *name = "cudaGraphLaunch_v10000"; break;
    default: *name = cupti::lasting("cudaCall" + std::to_string(id));
  }
  return CUPTI_SUCCESS;
}

EXPORTED CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                                    CUpti_BuffersCallbackCompleteFunc complete) {
  Records::get().register_buffers(request, complete);
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  Records::get().register_clock(clock);
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) { return set(kind, true); }
EXPORTED CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) { return set(kind, false); }
EXPORTED CUptiResult cuptiActivityEnableRuntimeApi(uint32_t id, uint8_t on) {
  Records::get().mute(false, id, !on);
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiActivityEnableDriverApi(uint32_t id, uint8_t on) {
  Records::get().mute(true, id, !on);
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
EXPORTED CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
EXPORTED CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* dropped) {
  *dropped = Records::get().take_dropped();
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiActivityFlushAll(uint32_t) {
  Records::get().flush();
  return CUPTI_SUCCESS;
}

EXPORTED CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, CUpti_Activity** record) {
  uint8_t* next = *record ? reinterpret_cast<uint8_t*>(*record) + cupti::size_of((*record)->kind) : buffer;
  if (next >= buffer + valid) {
    *record = nullptr;
    return CUPTI_ERROR_MAX_LIMIT_REACHED;
  }
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}

EXPORTED CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  external_ids.emplace_back(kind, id);
  return CUPTI_SUCCESS;
}
EXPORTED CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* id) {
  for (auto one = external_ids.rbegin(); one != external_ids.rend(); ++one) {
    if (one->first != static_cast<uint32_t>(kind)) continue;
    if (id) *id = one->second;
    external_ids.erase(std::next(one).base());
    return CUPTI_SUCCESS;
  }
  return CUPTI_ERROR_QUEUE_EMPTY;
}

}  // extern "C"
