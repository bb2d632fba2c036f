#include "plan.h"

#include <cuda_runtime_api.h>
#include <cupti_driver_cbid.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../compute/values.h"
#include "../core/faults.h"
#include "../core/settings.h"
#include "reduce.h"

namespace nccl {
namespace {

const char* operation_name(int operation) {
  static const char* const names[] = {"Sum", "Prod", "Max", "Min", "Avg"};
  return operation < first_custom ? names[operation] : "PreMulSum";
}

void write_file(const std::string& path, const void* data, size_t size) {
  int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  for (size_t done = 0; file >= 0 && done < size;) {
    ssize_t wrote = write(file, static_cast<const char*>(data) + done, size - done);
    if (wrote <= 0) break;
    done += static_cast<size_t>(wrote);
  }
  if (file >= 0) close(file);
}

void read_file(const std::string& path, void* data, size_t size) {
  int file = open(path.c_str(), O_RDONLY);
  for (size_t done = 0; file >= 0 && done < size;) {
    ssize_t got = read(file, static_cast<char*>(data) + done, size - done);
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  if (file >= 0) close(file);
}

}  // namespace

// Of a single rank NCCL launches no kernel: it copies what is not in place.
bool Plan::needs_no_kernel() const {
  auto plain = [](const Collective& one) { return one.factor == 1; };
  return communicator_->size == 1 && messages_.empty() && std::all_of(collectives_.begin(), collectives_.end(), plain);
}

bool Plan::enqueue(const std::shared_ptr<Plan>& plan, void* stream) {
  if (plan->needs_no_kernel()) {
    for (const Collective& one : plan->collectives_) {
      if (one.from == one.to) continue;
      if (cudaMemcpyAsync(one.to, one.from, one.count * width_of(one.type), cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(stream)))
        return false;
    }
    return true;
  }
  simulation::ApiCall call(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, true);
  auto task = std::make_shared<simulation::Task>();
  task->kind = simulation::Kind::collective;
  task->task_class = simulation::Class::communication;
  task->name = plan->name();
  task->alone_ns = simulation::duration_by_rule(task->name, plan->duration_ns());
  task->channels = task->grid[0] = simulation::settings().channels;
  // With as many registers none of a multiprocessor's are left for others.
  bool takes = simulation::settings().channels_take_multiprocessors;
  task->block[0] = takes ? 512 : 544;
  task->registers = takes ? 128 : 32;
  task->shared_bytes = 82240;
  // Each launch of a graph is a collective of its own.
  if (simulation::is_capturing(stream))
    task->renew = [plan](simulation::Task& launched, void* on) { place(std::make_shared<Plan>(*plan), launched, on); };
  else place(plan, *task, stream);
  return simulation::enqueue(stream, std::move(task)) == 0;
}

void Plan::place(const std::shared_ptr<Plan>& plan, simulation::Task& task, void* stream) {
  Communicator* communicator = plan->communicator_;
  if (!plan->collectives_.empty()) plan->number_ = communicator->collectives++;
  for (Numbered& one : plan->messages_) {
    auto& counts = one.message.sends ? communicator->sent : communicator->received;
    one.number = counts[one.message.peer]++;
  }
  if (communicator->last && communicator->last_stream != stream)
    simulation::enqueue(stream, simulation::mark(simulation::Kind::event_wait, communicator->last));
  task.moment = communicator->last = std::make_shared<simulation::Moment>();
  communicator->last_stream = stream;
  task.effect = [plan] { plan->finish(); };
  task.meeting = plan;
}

// -- what it is, and how long it takes

std::string Plan::name() const {
  const char* end = "(ncclDevKernelArgsStorage<4096ul>)";
  if (collectives_.empty()) return std::string("ncclDevKernel_SendRecv") + end;
  const Collective& first = collectives_.front();
  auto same = [&](const Collective& one) { return one.what == first.what && one.type == first.type; };
  if (!messages_.empty() || !std::all_of(collectives_.begin(), collectives_.end(), same)) {
    return std::string("ncclDevKernel_Generic_4") + end;
  }
  std::string reduction = std::string("_") + operation_name(first.operation) + "_" + name_of(first.type);
  switch (first.what) {
    case What::all_reduce: return "ncclDevKernel_AllReduce" + reduction + "_RING_LL" + end;
    case What::reduce_scatter: return "ncclDevKernel_ReduceScatter" + reduction + "_RING_LL" + end;
    case What::reduce: return "ncclDevKernel_Reduce" + reduction + "_RING_LL" + end;
    case What::all_gather: return std::string("ncclDevKernel_AllGather_RING_LL") + end;
    case What::broadcast: return std::string("ncclDevKernel_Broadcast_RING_LL") + end;
    default: return std::string("ncclDevKernel_SendRecv") + end;
  }
}

// What one kind of kernel of exactly so many bytes takes more: "AllReduce:BYTES:MICROSECONDS". Read each time, so that a
// job can make another collective slow from step to step.
double Plan::extra_ns(double bytes) const {
  char kind[32];
  double of_bytes = 0, extra_us = 0;
  const char* given = getenv("SIMGPU_SLOW_COLLECTIVE");
  if (!given || sscanf(given, "%31[^:]:%lf:%lf", kind, &of_bytes, &extra_us) != 3) return 0;
  return bytes == of_bytes && name().find(kind) != std::string::npos ? 1e3 * extra_us : 0;
}

double Plan::duration_ns() const {
  const simulation::Settings& settings = simulation::settings();
  auto ranks = static_cast<double>(communicator_->size);
  double ring_bytes = 0, out_ns = 0, in_ns = 0, all_bytes = 0;
  for (const Collective& one : collectives_) {
    auto bytes = static_cast<double>(one.count * width_of(one.type));
    bool parts = one.what == What::reduce_scatter || one.what == What::all_gather;
    all_bytes += parts ? ranks * bytes : bytes;
    switch (one.what) {
      case What::all_reduce: ring_bytes += 2 * (ranks - 1) / ranks * bytes; break;
      case What::reduce_scatter:
      case What::all_gather:
      case What::all_to_all: ring_bytes += (ranks - 1) * bytes; break;
      default: ring_bytes += ranks > 1 ? bytes : 0;
    }
  }
  for (const Numbered& one : messages_) {
    double own_ns = static_cast<double>(one.message.size) / communicator_->link_bandwidth(one.message.peer);
    (one.message.sends ? out_ns : in_ns) += own_ns;
  }
  double transfer_ns = ring_bytes / communicator_->ring_bandwidth() + std::max(out_ns, in_ns);
  return settings.collective_ns + transfer_ns + extra_ns(all_bytes);
}

// The same on all ranks: by the sizes alone.
bool Plan::moves_data() const {
  size_t bytes = 0;
  for (const Collective& one : collectives_) bytes += one.count * width_of(one.type);
  return bytes <= simulation::settings().most_data_bytes;
}

// Bytes that a rank hands over for a collective.
size_t Plan::published(const Collective& one, int rank) const {
  size_t bytes = one.count * width_of(one.type);
  switch (one.what) {
    case What::reduce_scatter:
    case What::all_to_all: return bytes * communicator_->size;
    case What::broadcast: return rank == one.root ? bytes : 0;
    default: return bytes;
  }
}

// -- the meeting

Arrival& Plan::side(const Numbered& one, bool own) const {
  const Message& message = one.message;
  int from = message.sends ? communicator_->rank : message.peer,
      to = message.sends ? message.peer : communicator_->rank;
  return communicator_->board.message(from, to, message.sends == own, one.number);
}

std::string Plan::message_file(const Numbered& one) const {
  const Message& message = one.message;
  int from = message.sends ? communicator_->rank : message.peer,
      to = message.sends ? message.peer : communicator_->rank;
  return communicator_->folder + "/message-" + std::to_string(from) + "-" + std::to_string(to) + "-" +
         std::to_string(one.number);
}

void Plan::arrive(int64_t time) {
  start_ = time;
  if (simulation::fault(simulation::Fault::nccl)) return;
  if (!collectives_.empty()) {
    Arrival& own = communicator_->board.arrival(communicator_->rank, number_);
    own.time = time;
    own.number = number_ + 1;
  }
  for (const Numbered& one : messages_) {
    Arrival& own = side(one, true);
    own.time = time;
    own.number = one.number + 1;
  }
}

int64_t Plan::met() {
  if (communicator_->aborted) return start_;
  if (simulation::fault(simulation::Fault::nccl)) return -1;
  int64_t last = start_;
  for (int rank = 0; !collectives_.empty() && rank < communicator_->size; rank++) {
    Arrival& arrival = communicator_->board.arrival(rank, number_);
    if (arrival.number != number_ + 1) return -1;
    last = std::max(last, arrival.time.load());
  }
  for (const Numbered& one : messages_) {
    Arrival& other = side(one, false);
    if (other.number != one.number + 1) return -1;
    last = std::max(last, other.time.load());
  }
  return last;
}

int64_t Plan::horizon() {
  int64_t earliest = INT64_MAX;
  for (int rank = 0; !collectives_.empty() && rank < communicator_->size; rank++) {
    if (rank == communicator_->rank || communicator_->board.arrival(rank, number_).number == number_ + 1) continue;
    earliest = std::min(earliest, communicator_->peers[rank].horizon());
  }
  for (const Numbered& one : messages_) {
    if (side(one, false).number == one.number + 1) continue;
    earliest = std::min(earliest, communicator_->peers[one.message.peer].horizon());
  }
  return earliest;
}

// -- the data, moved by the worker

void Plan::publish() {
  if (!collectives_.empty()) {
    if (moves_data()) {
      size_t size = 0;
      for (const Collective& one : collectives_) size += published(one, communicator_->rank);
      // The other ranks have read what lay there two collectives ago: they have published the last one since.
      char* to = size ? communicator_->data(communicator_->rank, number_).writable(size) : nullptr;
      for (const Collective& one : collectives_) {
        size_t bytes = published(one, communicator_->rank);
        if (bytes) memcpy(to, one.from, bytes);
        to += bytes;
      }
    }
    communicator_->board.arrival(communicator_->rank, number_).data = number_ + 1;
  }
  for (const Numbered& one : messages_) {
    if (!one.message.sends) continue;
    if (one.message.size <= simulation::settings().most_data_bytes) {
      write_file(message_file(one), one.message.address, one.message.size);
    }
    side(one, true).data = one.number + 1;
  }
  if (simulation::settings().computes && moves_data()) spoil();
}

// Until it ends, who reads its results without a wait reads no numbers.
void Plan::spoil() {
  std::vector<std::pair<const void*, size_t>> places;
  for (const Collective& one : collectives_) {
    places.emplace_back(one.from, published(one, communicator_->rank));
    bool parts = one.what == What::all_gather || one.what == What::all_to_all;
    if (one.what == What::reduce && communicator_->rank != one.root) continue;
    places.emplace_back(one.to, one.count * width_of(one.type) * (parts ? communicator_->size : 1));
    memset(one.to, 0xff, places.back().second);
  }
  for (const Numbered& one : messages_) {
    places.emplace_back(one.message.address, one.message.size);
    if (!one.message.sends) memset(one.message.address, 0xff, one.message.size);
  }
  for (auto [at, size] : places) {
    auto* bytes = static_cast<const char*>(at);
    lies_.emplace_back(bytes, std::vector<char>(bytes, bytes + size));
  }
  compute::changed();
  changes_ = compute::changes();
}

// Whether somebody has written meanwhile to what it reads or writes, without waiting for it.
bool Plan::was_disturbed() const {
  if (changes_ == compute::changes()) return false;
  return !std::all_of(lies_.begin(), lies_.end(), [](const auto& one) {
    return std::equal(one.second.begin(), one.second.end(), one.first);
  });
}

void Plan::wait_for_data(Arrival& arrival, uint64_t number) const {
  while (arrival.data != number + 1 && !communicator_->aborted) usleep(50);
}

void Plan::finish() {
  bool disturbed = was_disturbed();
  if (!collectives_.empty()) {
    for (int rank = 0; rank < communicator_->size; rank++)
      wait_for_data(communicator_->board.arrival(rank, number_), number_);
    if (communicator_->aborted) return;
    if (moves_data()) {
      std::vector<const char*> parts(communicator_->size, nullptr);
      for (int rank = 0; rank < communicator_->size; rank++) {
        size_t size = 0;
        for (const Collective& one : collectives_) size += published(one, rank);
        if (size) parts[rank] = communicator_->data(rank, number_).readable(size);
      }
      for (const Collective& one : collectives_) {
        compute(one, parts);
        for (int rank = 0; rank < communicator_->size; rank++) parts[rank] += published(one, rank);
      }
    }
  }
  for (const Numbered& one : messages_) {
    if (one.message.sends) continue;
    wait_for_data(side(one, false), one.number);
    if (communicator_->aborted || one.message.size > simulation::settings().most_data_bytes) continue;
    read_file(message_file(one), one.message.address, one.message.size);
    unlink(message_file(one).c_str());
  }
  compute::changed();
  // What was written there is lost too, so that it shows on the rank that sent it.
  for (const auto& [at, bytes] : lies_)
    if (disturbed) memset(const_cast<char*>(at), 0xff, bytes.size());
}

void Plan::compute(const Collective& one, const std::vector<const char*>& parts) const {
  size_t bytes = one.count * width_of(one.type);
  int rank = communicator_->rank;
  auto* to = static_cast<char*>(one.to);
  switch (one.what) {
    case What::reduce:
      if (rank != one.root) return;
      [[fallthrough]];
    case What::all_reduce: return reduce(to, parts, one.count, one.type, one.operation, one.factor);
    case What::reduce_scatter: {
      std::vector<const char*> own;
      for (const char* part : parts) own.push_back(part + rank * bytes);
      return reduce(to, own, one.count, one.type, one.operation, one.factor);
    }
    case What::all_gather:
      for (size_t other = 0; other < parts.size(); other++) memcpy(to + other * bytes, parts[other], bytes);
      return;
    case What::all_to_all:
      for (size_t other = 0; other < parts.size(); other++)
        memcpy(to + other * bytes, parts[other] + rank * bytes, bytes);
      return;
    case What::broadcast: memcpy(to, parts[one.root], bytes); return;
  }
}

}  // namespace nccl
