// Graphs: captured, made ready, launched.
#include <algorithm>
#include <map>

#include "../core/capture.h"
#include "runtime.h"

using simulation::ApiCall;
using simulation::Graph;
using simulation::Kind;
using simulation::mark;
using simulation::Moment;
using simulation::Node;
using simulation::Task;

namespace runtime {
namespace {

void wait(void* stream, const std::shared_ptr<Moment>& moment) {
  simulation::enqueue(stream, mark(Kind::event_wait, moment));
}

std::shared_ptr<Moment> record(void* stream) {
  auto moment = std::make_shared<Moment>();
  simulation::enqueue(stream, mark(Kind::event_record, moment));
  return moment;
}

// A graph that can be launched. Its nodes lie on lanes: the stream of the launch, and one of its own for each branch
// that runs beside it.
class Ready {
 public:
  explicit Ready(std::shared_ptr<Graph> graph) : graph_(std::move(graph)) {
    std::vector<const Node*> last;  // of each lane
    for (auto& node : graph_->nodes) {
      auto follows = [&](const Node* one) { return one && std::count(node->before.begin(), node->before.end(), one); };
      auto lane = std::find_if(last.begin(), last.end(), follows);
      if (lane == last.end()) lane = last.insert(last.end(), nullptr);
      *lane = node.get();
      lane_of_[node.get()] = static_cast<size_t>(lane - last.begin());
    }
    for (size_t lane = 1; lane < last.size(); lane++) streams_.push_back(simulation::make_stream(0));
  }

  const Graph& graph() const { return *graph_; }

  void launch(void* stream) {
    // A graph does not run beside itself.
    if (last_) wait(stream, last_);
    if (!streams_.empty()) {
      auto begun = record(stream);
      for (void* own : streams_) wait(own, begun);
    }
    std::map<const Node*, std::shared_ptr<Moment>> ends;
    for (auto& node : graph_->nodes) {
      size_t lane = lane_of_[node.get()];
      void* on = lane ? streams_[lane - 1] : stream;
      for (const Node* one : node->before)
        if (lane_of_[one] != lane) wait(on, ends[one]);
      ends[node.get()] = launch(*node, on);
    }
    for (void* own : streams_) wait(stream, record(own));
    last_ = record(stream);
  }

 private:
  // Returns when it ends.
  std::shared_ptr<Moment> launch(const Node& node, void* stream) const {
    auto task = std::make_shared<Task>(*node.task);
    task->graph = graph_->id;
    task->node = node.id;
    if (task->renew) task->renew(*task, stream);
    if (task->kind == Kind::event_wait) {
      if (task->moment) wait(stream, task->moment);
      return record(stream);
    }
    if (!task->moment) task->moment = std::make_shared<Moment>();
    std::shared_ptr<Moment> end = task->moment;
    simulation::enqueue(stream, std::move(task));
    return end;
  }

  std::shared_ptr<Graph> graph_;
  std::map<const Node*, size_t> lane_of_;
  std::vector<void*> streams_;
  std::shared_ptr<Moment> last_;  // the end of the last launch
};

std::shared_ptr<Graph>& graph_of(cudaGraph_t handle) { return *reinterpret_cast<std::shared_ptr<Graph>*>(handle); }
Ready* ready_of(cudaGraphExec_t handle) { return reinterpret_cast<Ready*>(handle); }
cudaGraphNode_t handle_of(const Node* node) { return reinterpret_cast<cudaGraphNode_t>(const_cast<Node*>(node)); }

// Fills what the caller has room for, and says how many there are.
template <class Nodes>
void tell(const Nodes& nodes, cudaGraphNode_t* to, size_t* count) {
  size_t room = to ? *count : 0, number = 0;
  for (auto& node : nodes) {
    if (number < room) to[number] = handle_of(&*node);
    number++;
  }
  *count = to ? std::min(room, number) : number;
}

}  // namespace
}  // namespace runtime

using namespace runtime;

extern "C" {

EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ApiCall call(CALL_ID(cudaStreamBeginCapture_v10000));
  return result(simulation::begin_capture(stream, mode));
}

EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ApiCall call(CALL_ID(cudaStreamEndCapture_v10000));
  std::shared_ptr<Graph> found;
  cudaError_t error = simulation::end_capture(stream, &found);
  *graph = error ? nullptr : reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(found));
  return result(error);
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph,
                                              const cudaGraphNode_t** before, const cudaGraphEdgeData** edges,
                                              size_t* count) {
  simulation::CapturedPoint point = simulation::captured_point(stream);
  *status = point.capture ? point.capture->status : cudaStreamCaptureStatusNone;
  if (id) *id = point.capture ? point.capture->id : 0;
  if (!point.capture) return cudaSuccess;
  // What is handed out is good until this thread asks again.
  static thread_local std::vector<cudaGraphNode_t> nodes;
  nodes.clear();
  for (const Node* node : point.after) nodes.push_back(handle_of(node));
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(&point.capture->graph);
  if (before) *before = nodes.data();
  if (edges) *edges = nullptr;
  if (count) *count = nodes.size();
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = simulation::exchange_mode(*mode);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = reinterpret_cast<cudaGraphExec_t>(new Ready(graph_of(graph)));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaGraphLaunch_v10000));
  if (simulation::is_capturing(stream)) return result(simulation::embed(stream, ready_of(ready)->graph()));
  ready_of(ready)->launch(stream);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) {
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  delete ready_of(ready);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  delete &graph_of(graph);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  tell(graph_of(graph)->nodes, nodes, count);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* before, cudaGraphEdgeData*,
                                                  size_t* count) {
  tell(reinterpret_cast<Node*>(node)->before, before, count);
  return cudaSuccess;
}

}  // extern "C"
