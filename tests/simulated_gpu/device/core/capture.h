// Capture: what is enqueued on a stream becomes the nodes of a graph in place of running.
//
// Errors are CUDA's, and so are the rules of when a call spoils a capture.
#pragma once

#include <driver_types.h>

#include <map>
#include <memory>
#include <vector>

#include "simulation.h"

namespace simulation {

// A task that each launch of the graph runs a copy of.
struct Node {
  uint64_t id;
  std::shared_ptr<Task> task;
  std::vector<Node*> before;  // that it waits for
};

struct Graph {
  uint32_t id;
  std::vector<std::shared_ptr<Node>> nodes;  // each after those that it waits for
};

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  long thread;  // that began it
  Stream* origin;
  std::shared_ptr<Graph> graph;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;  // none: it is over
  std::map<Stream*, std::vector<Node*>> ends = {};                 // by stream: what its next node waits for
};

// Where a stream stands in its capture: what an event that is recorded there means.
struct CapturedPoint {
  std::shared_ptr<Capture> capture = nullptr;  // none: not recorded in one
  std::vector<Node*> after = {};
};

cudaError_t begin_capture(void* stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(void* stream, std::shared_ptr<Graph>* graph);
// The capture that a stream takes part in; none: it runs what is enqueued.
std::shared_ptr<Capture> capture_of(void* stream);
CapturedPoint captured_point(void* stream);
// Lets a stream wait for a point of a capture, which it thereby joins.
cudaError_t join(void* stream, const CapturedPoint& point);
// Puts the nodes of another graph into the capture of a stream.
cudaError_t embed(void* stream, const Graph& graph);
// Sets this thread's mode, and returns the one before.
cudaStreamCaptureMode exchange_mode(cudaStreamCaptureMode mode);

// Before calls that capture does not see: success where no capture forbids them to this thread. Else those that do are
// spoilt.
cudaError_t check_unsafe();
// The same for what asks about a stream or a point, or waits for it: never in a capture.
cudaError_t check_asked(void* stream);
cudaError_t check_asked(const CapturedPoint& point);
cudaError_t check_asked_device(int device);
// Spoils a capture: its streams take nothing more, and its end gives no graph.
cudaError_t spoil(const std::shared_ptr<Capture>& capture, cudaError_t error);

}  // namespace simulation
