#include "capture.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "engine.h"

namespace simulation {
namespace {

using Held = std::lock_guard<std::mutex>;

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
uint64_t next_capture = 1, next_node = 1;  // under the simulation's lock
uint32_t next_graph = 1;

long this_thread() { return syscall(SYS_gettid); }

// Those that have not ended. Changed under the simulation's lock; the number can be read without.
std::vector<std::shared_ptr<Capture>>& captures() {
  static auto& once = *new std::vector<std::shared_ptr<Capture>>;
  return once;
}
std::atomic<size_t> number_of_captures{0};

bool is_legacy(void* stream) { return reinterpret_cast<uintptr_t>(stream) <= 1; }

std::shared_ptr<Node> make_node(std::shared_ptr<Task> task, std::vector<Node*> before) {
  return std::make_shared<Node>(Node{next_node++, std::move(task), std::move(before)});
}

void add_once(std::vector<Node*>& to, const std::vector<Node*>& more) {
  for (Node* node : more)
    if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

// Whether the origin waits, by whatever way, for all that was forked from it.
bool is_joined(const Capture& capture) {
  std::set<const Node*> found;
  std::vector<Node*> left = capture.ends.at(capture.origin);
  while (!left.empty()) {
    Node* node = left.back();
    left.pop_back();
    if (found.insert(node).second) left.insert(left.end(), node->before.begin(), node->before.end());
  }
  return found.size() == capture.graph->nodes.size();
}

// -- all of these under the simulation's lock

cudaError_t spoil_now(Capture& capture, cudaError_t error) {
  if (capture.status == cudaStreamCaptureStatusInvalidated) return cudaErrorStreamCaptureInvalidated;
  capture.status = cudaStreamCaptureStatusInvalidated;
  return error;
}

// The legacy stream waits for all blocking streams, which a capture cannot hold.
cudaError_t check_legacy(void* handle, const Stream* stream) {
  if (!number_of_captures || !is_legacy(handle)) return cudaSuccess;
  for (auto& capture : captures()) {
    for (auto& [member, ends] : capture->ends) {
      if (member->blocking && member->device == stream->device)
        return spoil_now(*capture, cudaErrorStreamCaptureImplicit);
    }
  }
  return cudaSuccess;
}

}  // namespace

int Simulation::capture(void* handle, Stream* stream, std::shared_ptr<Task>& task) {
  if (cudaError_t error = check_legacy(handle, stream)) return error;
  if (!stream->capture) return 0;
  Capture& capture = *stream->capture;
  if (capture.status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  std::vector<Node*>& ends = capture.ends[stream];
  capture.graph->nodes.push_back(make_node(std::move(task), std::move(ends)));
  ends = {capture.graph->nodes.back().get()};
  return 0;
}

cudaError_t begin_capture(void* handle, cudaStreamCaptureMode mode) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture) return cudaErrorIllegalState;
  auto graph = std::make_shared<Graph>(Graph{next_graph++, {}});
  auto capture = std::make_shared<Capture>(Capture{next_capture++, mode, this_thread(), stream, graph});
  capture->ends[stream] = {};
  stream->capture = capture;
  captures().push_back(capture);
  number_of_captures = captures().size();
  return cudaSuccess;
}

cudaError_t end_capture(void* handle, std::shared_ptr<Graph>* graph) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return cudaErrorIllegalState;
  if (capture->origin != stream) return spoil_now(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread())
    return cudaErrorStreamCaptureWrongThread;
  bool whole = capture->status == cudaStreamCaptureStatusActive;
  capture->status = cudaStreamCaptureStatusNone;
  for (auto& [member, ends] : capture->ends) member->capture = nullptr;
  auto& all = captures();
  all.erase(std::find(all.begin(), all.end(), capture));
  number_of_captures = all.size();
  if (!whole) return cudaErrorStreamCaptureInvalidated;
  if (!is_joined(*capture)) return cudaErrorStreamCaptureUnjoined;
  *graph = capture->graph;
  return cudaSuccess;
}

std::shared_ptr<Capture> capture_of(void* handle) {
  if (!number_of_captures) return nullptr;
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  return simulation.stream(handle)->capture;
}

bool is_capturing(void* stream) { return capture_of(stream) != nullptr; }

CapturedPoint captured_point(void* handle) {
  if (!number_of_captures) return {};
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  if (!stream->capture) return {};
  return {stream->capture, stream->capture->ends[stream]};
}

cudaError_t join(void* handle, const CapturedPoint& point) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  if (point.capture->status == cudaStreamCaptureStatusNone) return cudaErrorCapturedEvent;
  if (point.capture->status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return spoil_now(*point.capture, cudaErrorStreamCaptureImplicit);
  if (stream->capture && stream->capture != point.capture) {
    spoil_now(*stream->capture, cudaErrorStreamCaptureMerge);
    return spoil_now(*point.capture, cudaErrorStreamCaptureMerge);
  }
  stream->capture = point.capture;
  add_once(point.capture->ends[stream], point.after);
  return cudaSuccess;
}

cudaError_t embed(void* handle, const Graph& graph) {
  Simulation& simulation = Simulation::get();
  Held held(simulation.lock);
  Stream* stream = simulation.stream(handle);
  Capture& capture = *stream->capture;
  if (capture.status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  std::vector<Node*> ends = std::move(capture.ends[stream]), last;
  std::map<const Node*, Node*> copies;
  std::set<const Node*> waited_for;
  for (auto& node : graph.nodes) {
    std::vector<Node*> before;
    for (Node* one : node->before) before.push_back(copies.at(one));
    waited_for.insert(node->before.begin(), node->before.end());
    capture.graph->nodes.push_back(make_node(node->task, node->before.empty() ? ends : before));
    copies[node.get()] = capture.graph->nodes.back().get();
  }
  for (auto& node : graph.nodes)
    if (!waited_for.count(node.get())) last.push_back(copies[node.get()]);
  capture.ends[stream] = graph.nodes.empty() ? ends : last;
  return cudaSuccess;
}

cudaStreamCaptureMode exchange_mode(cudaStreamCaptureMode mode) { return std::exchange(mode_of_thread, mode); }

cudaError_t check_unsafe() {
  if (!number_of_captures || mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  Held held(Simulation::get().lock);
  cudaError_t found = cudaSuccess;
  for (auto& capture : captures()) {
    bool own = capture->thread == this_thread() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool all = mode_of_thread == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!own && !all) continue;
    spoil_now(*capture, cudaErrorStreamCaptureUnsupported);
    found = cudaErrorStreamCaptureUnsupported;
  }
  return found;
}

cudaError_t check_asked(void* handle) {
  if (!number_of_captures) return cudaSuccess;
  {
    Simulation& simulation = Simulation::get();
    Held held(simulation.lock);
    Stream* stream = simulation.stream(handle);
    if (cudaError_t error = check_legacy(handle, stream)) return error;
    if (stream->capture) return spoil_now(*stream->capture, cudaErrorStreamCaptureUnsupported);
  }
  return check_unsafe();
}

cudaError_t check_asked(const CapturedPoint& point) {
  if (!point.capture) return check_unsafe();
  spoil(point.capture, cudaErrorCapturedEvent);
  return cudaErrorCapturedEvent;
}

cudaError_t check_asked_device(int device) {
  if (!number_of_captures) return cudaSuccess;
  Held held(Simulation::get().lock);
  cudaError_t found = cudaSuccess;
  for (auto& capture : captures()) {
    if (capture->origin->device != device) continue;
    spoil_now(*capture, cudaErrorStreamCaptureUnsupported);
    found = cudaErrorStreamCaptureUnsupported;
  }
  return found;
}

cudaError_t spoil(const std::shared_ptr<Capture>& capture, cudaError_t error) {
  Held held(Simulation::get().lock);
  return capture->status == cudaStreamCaptureStatusNone ? error : spoil_now(*capture, error);
}

}  // namespace simulation
