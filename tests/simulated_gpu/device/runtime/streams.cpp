// Streams, events and host functions.
#include "runtime.h"

using simulation::ApiCall;
using simulation::Class;
using simulation::Kind;
using simulation::Moment;
using simulation::Task;

namespace {

struct Event {
  std::shared_ptr<Moment> recorded;  // none before the first recording
  bool timed;
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

std::shared_ptr<Task> mark(Kind kind, std::shared_ptr<Moment> moment) {
  auto task = std::make_shared<Task>();
  task->kind = kind;
  task->task_class = Class::none;
  task->moment = std::move(moment);
  return task;
}

cudaError_t call_host(cudaStream_t stream, std::function<void()> function) {
  std::shared_ptr<Task> task = mark(Kind::host_function, nullptr);
  task->effect = std::move(function);
  simulation::enqueue(stream, std::move(task));
  return cudaSuccess;
}

}  // namespace

extern "C" {

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = static_cast<cudaStream_t>(simulation::make_stream(priority));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  simulation::end_stream(stream);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = simulation::priority_of(stream);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaStreamSynchronize_v3020));
  simulation::wait_for_stream(stream);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return simulation::stream_is_done(stream) ? cudaSuccess : runtime::fail(cudaErrorNotReady);
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return call_host(stream, [=] { function(argument); });
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument,
                                           unsigned) {
  return call_host(stream, [=] { function(stream, cudaSuccess, argument); });
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{nullptr, (flags & cudaEventDisableTiming) == 0});
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  ApiCall call(CALL_ID(cudaEventRecord_v3020));
  // A new recording replaces the last one; streams that wait for that one go on waiting for it.
  event_of(event)->recorded = std::make_shared<Moment>();
  simulation::enqueue(stream, mark(Kind::event_record, event_of(event)->recorded));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ApiCall call(CALL_ID(cudaStreamWaitEvent_v3020));
  std::shared_ptr<Moment> moment = event_of(event)->recorded;
  if (moment && !simulation::has_passed(moment)) simulation::enqueue(stream, mark(Kind::event_wait, moment));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::shared_ptr<Moment>& moment = event_of(event)->recorded;
  return !moment || simulation::is_visible(moment) ? cudaSuccess : runtime::fail(cudaErrorNotReady);
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ApiCall call(CALL_ID(cudaEventSynchronize_v3020));
  if (std::shared_ptr<Moment> moment = event_of(event)->recorded) simulation::wait_for(moment);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const Event *first = event_of(from), *second = event_of(to);
  if (!first->timed || !second->timed || !first->recorded || !second->recorded) {
    return runtime::fail(cudaErrorInvalidResourceHandle);
  }
  if (!simulation::is_visible(first->recorded) || !simulation::is_visible(second->recorded)) {
    return runtime::fail(cudaErrorNotReady);
  }
  *milliseconds = static_cast<float>(static_cast<double>(second->recorded->time - first->recorded->time) / 1e6);
  return cudaSuccess;
}

}  // extern "C"
