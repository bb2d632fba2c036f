// Streams, events and host functions.
#include "../core/capture.h"
#include "runtime.h"

using simulation::ApiCall;
using simulation::Kind;
using simulation::mark;
using simulation::Moment;
using simulation::Task;

namespace {

struct Event {
  std::shared_ptr<Moment> recorded;  // none before the first recording
  bool timed;
  simulation::CapturedPoint captured = {};  // where its last recording was in a capture
};

// Graphs that record an event or wait for it outlive its handle.
using Handle = std::shared_ptr<Event>;
Handle& handle_of(cudaEvent_t handle) { return *reinterpret_cast<Handle*>(handle); }
Event* event_of(cudaEvent_t handle) { return handle_of(handle).get(); }

cudaError_t call_host(cudaStream_t stream, std::function<void()> function) {
  NEED_DEVICE;
  std::shared_ptr<Task> task = mark(Kind::host_function);
  task->effect = std::move(function);
  return runtime::result(simulation::enqueue(stream, std::move(task)));
}

cudaError_t record(cudaStream_t stream, Event& event) {
  event.captured = {};
  // A new recording replaces the last one; streams that wait for that one go on waiting for it.
  event.recorded = std::make_shared<Moment>();
  return runtime::result(simulation::enqueue(stream, mark(Kind::event_record, event.recorded)));
}

// Recordings and waits that each launch of a graph is to do anew: of events that others see too.
cudaError_t capture_external(cudaStream_t stream, Kind kind, const Handle& event) {
  std::shared_ptr<Task> task = mark(kind);
  task->renew = [event, kind](Task& launched, void*) {
    if (kind == Kind::event_record) event->recorded = std::make_shared<Moment>();
    launched.moment = event->recorded;
  };
  return runtime::result(simulation::enqueue(stream, std::move(task)));
}

}  // namespace

extern "C" {

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  NEED_DEVICE;
  *stream = static_cast<cudaStream_t>(simulation::make_stream(priority, !(flags & cudaStreamNonBlocking)));
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
  if (cudaError_t error = simulation::check_asked(stream)) return runtime::fail(error);
  simulation::wait_for_stream(stream);
  return runtime::lost();
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  NEED_DEVICE;
  if (cudaError_t error = simulation::check_asked(stream)) return runtime::fail(error);
  return simulation::stream_is_done(stream) ? cudaSuccess : runtime::fail(cudaErrorNotReady);
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return call_host(stream, [=] { function(argument); });
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument,
                                           unsigned) {
  if (cudaError_t error = simulation::check_asked(stream)) return runtime::fail(error);
  return call_host(stream, [=] { function(stream, cudaSuccess, argument); });
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  NEED_DEVICE;
  bool timed = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(new Handle(std::make_shared<Event>(Event{nullptr, timed})));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &handle_of(event);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  ApiCall call(CALL_ID(cudaEventRecord_v3020));
  NEED_DEVICE;
  simulation::CapturedPoint point = simulation::captured_point(stream);
  if (!point.capture) return record(stream, *event_of(event));
  if (flags & cudaEventRecordExternal) return capture_external(stream, Kind::event_record, handle_of(event));
  if (point.capture->status != cudaStreamCaptureStatusActive)
    return runtime::fail(cudaErrorStreamCaptureInvalidated);
  event_of(event)->captured = std::move(point);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  ApiCall call(CALL_ID(cudaStreamWaitEvent_v3020));
  NEED_DEVICE;
  std::shared_ptr<simulation::Capture> capture = simulation::capture_of(stream);
  if (capture && (flags & cudaEventWaitExternal)) return capture_external(stream, Kind::event_wait, handle_of(event));
  if (event_of(event)->captured.capture) return runtime::result(simulation::join(stream, event_of(event)->captured));
  std::shared_ptr<Moment> moment = event_of(event)->recorded;
  if (!moment) return cudaSuccess;
  if (capture) return runtime::fail(simulation::spoil(capture, cudaErrorStreamCaptureIsolation));
  if (simulation::has_passed(moment)) return cudaSuccess;
  return runtime::result(simulation::enqueue(stream, mark(Kind::event_wait, moment)));
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  NEED_DEVICE;
  if (cudaError_t error = simulation::check_asked(event_of(event)->captured)) return runtime::fail(error);
  const std::shared_ptr<Moment>& moment = event_of(event)->recorded;
  return !moment || simulation::is_visible(moment) ? cudaSuccess : runtime::fail(cudaErrorNotReady);
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ApiCall call(CALL_ID(cudaEventSynchronize_v3020));
  if (cudaError_t error = simulation::check_asked(event_of(event)->captured)) return runtime::fail(error);
  if (std::shared_ptr<Moment> moment = event_of(event)->recorded) simulation::wait_for(moment);
  return runtime::lost();
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  NEED_DEVICE;
  const Event *first = event_of(from), *second = event_of(to);
  for (const Event* one : {first, second})
    if (one->captured.capture) return runtime::fail(simulation::check_asked(one->captured));
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
