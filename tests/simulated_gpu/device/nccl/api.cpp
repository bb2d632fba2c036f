// NCCL's functions, as far as torch calls them.
#include <cstdio>
#include <random>

#include "../core/faults.h"
#include "plan.h"
#include "reduce.h"

using namespace nccl;
using simulation::Fault, simulation::fault;
using Stream = void*;

namespace {

// Of this thread: how deep its groups are, and what they hold so far.
struct Grouped {
  std::shared_ptr<Plan> plan;
  Stream stream;
};
thread_local int depth = 0;
thread_local std::vector<Grouped> group;

// Operations of a group on one communicator are one kernel.
template <class Operation>
Result add(const Operation& operation, Communicator* communicator, Stream stream) {
  Plan* plan = nullptr;
  for (Grouped& one : group) {
    if (one.plan->communicator() == communicator && one.stream == stream) plan = one.plan.get();
  }
  if (!plan) {
    group.push_back({std::make_shared<Plan>(communicator), stream});
    plan = group.back().plan.get();
  }
  plan->add(operation);
  return success;
}

Result end_group() {
  std::vector<Grouped> ended;
  ended.swap(group);
  for (Grouped& one : ended)
    if (!Plan::enqueue(one.plan, one.stream)) return unhandled_cuda_error;
  return success;
}

template <class Operation>
Result run(const Operation& operation, Communicator* communicator, Stream stream) {
  if (!communicator) return invalid_argument;
  if (fault(Fault::device)) return unhandled_cuda_error;
  add(operation, communicator, stream);
  return depth ? success : end_group();
}

// Looked up at the call: the operation may be destroyed before the kernel runs.
double factor_of(int operation, const Communicator* communicator) {
  if (!communicator) return 1;
  auto entry = communicator->factors.find(operation);
  return entry == communicator->factors.end() ? 1 : entry->second;
}

Result make(Communicator** made, int size, const UniqueId& id, int rank) {
  char name[33];
  for (int i = 0; i < 16; i++) snprintf(name + 2 * i, 3, "%02x", static_cast<unsigned char>(id.bytes[i]));
  *made = new Communicator(simulation::settings().folder + "/" + name, rank, size);
  return (*made)->meet() ? success : system_error;
}

}  // namespace

extern "C" {

EXPORTED Result ncclGetVersion(int* found) {
  *found = version;
  return success;
}

EXPORTED Result ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  for (char& byte : id->bytes) byte = static_cast<char>(random());
  return success;
}

EXPORTED Result ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, void*) {
  return make(made, size, id, rank);
}
EXPORTED Result ncclCommInitRank(Communicator** made, int size, UniqueId id, int rank) {
  return make(made, size, id, rank);
}
EXPORTED Result ncclCommInitRankScalable(Communicator** made, int size, int rank, int, UniqueId* ids, void*) {
  return make(made, size, ids[0], rank);
}
EXPORTED Result ncclCommSplit(Communicator* whole, int color, int key, Communicator** made, void*) {
  return whole->split(color, key, made) ? success : system_error;
}

EXPORTED Result ncclCommFinalize(Communicator*) { return success; }
// Kernels that stand in the queues still use it, so it stays.
EXPORTED Result ncclCommDestroy(Communicator*) { return success; }
EXPORTED Result ncclCommAbort(Communicator* communicator) {
  if (!communicator) return success;
  communicator->aborted = true;
  simulation::wake();
  return success;
}
EXPORTED Result ncclCommGetAsyncError(Communicator*, Result* error) {
  *error = static_cast<Result>(fault(Fault::nccl));
  return success;
}
EXPORTED Result ncclCommCount(const Communicator* communicator, int* size) {
  *size = communicator->size;
  return success;
}
EXPORTED Result ncclCommUserRank(const Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return success;
}
EXPORTED Result ncclCommRegister(const Communicator*, void* address, size_t, void** handle) {
  *handle = address;
  return success;
}
EXPORTED Result ncclCommDeregister(const Communicator*, void*) { return success; }

EXPORTED const char* ncclGetErrorString(Result result) {
  switch (result) {
    case success: return "no error";
    case unhandled_cuda_error: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case system_error: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case remote_error: return "remote process exited or there was a network error";
    default: return "error of the simulated NCCL";
  }
}
EXPORTED const char* ncclGetLastError(Communicator*) { return ""; }

EXPORTED Result ncclRedOpCreatePreMulSum(int* operation, void* scalar, Type type, int, Communicator* communicator) {
  static int next = first_custom;
  *operation = next++;
  communicator->factors[*operation] = read_number(scalar, type);
  return success;
}
EXPORTED Result ncclRedOpDestroy(int operation, Communicator* communicator) {
  communicator->factors.erase(operation);
  return success;
}

EXPORTED Result ncclGroupStart() {
  depth++;
  return success;
}
EXPORTED Result ncclGroupEnd() {
  if (!depth) return invalid_usage;
  return --depth ? success : end_group();
}

EXPORTED Result ncclAllReduce(const void* from, void* to, size_t count, Type type, int operation,
                              Communicator* communicator, Stream stream) {
  return run(Collective{What::all_reduce, from, to, count, type, operation, 0, factor_of(operation, communicator)},
             communicator, stream);
}
EXPORTED Result ncclReduceScatter(const void* from, void* to, size_t count, Type type, int operation,
                                  Communicator* communicator, Stream stream) {
  return run(Collective{What::reduce_scatter, from, to, count, type, operation, 0, factor_of(operation, communicator)},
             communicator, stream);
}
EXPORTED Result ncclAllGather(const void* from, void* to, size_t count, Type type, Communicator* communicator,
                              Stream stream) {
  return run(Collective{What::all_gather, from, to, count, type, sum, 0}, communicator, stream);
}
EXPORTED Result ncclBroadcast(const void* from, void* to, size_t count, Type type, int root, Communicator* communicator,
                              Stream stream) {
  return run(Collective{What::broadcast, from, to, count, type, sum, root}, communicator, stream);
}
EXPORTED Result ncclBcast(void* both, size_t count, Type type, int root, Communicator* communicator, Stream stream) {
  return run(Collective{What::broadcast, both, both, count, type, sum, root}, communicator, stream);
}
EXPORTED Result ncclReduce(const void* from, void* to, size_t count, Type type, int operation, int root,
                           Communicator* communicator, Stream stream) {
  return run(Collective{What::reduce, from, to, count, type, operation, root, factor_of(operation, communicator)},
             communicator, stream);
}
EXPORTED Result ncclAlltoAll(const void* from, void* to, size_t count, Type type, Communicator* communicator,
                             Stream stream) {
  return run(Collective{What::all_to_all, from, to, count, type, sum, 0}, communicator, stream);
}
EXPORTED Result ncclSend(const void* from, size_t count, Type type, int peer, Communicator* communicator,
                         Stream stream) {
  return run(Message{true, const_cast<void*>(from), count * width_of(type), peer}, communicator, stream);
}
EXPORTED Result ncclRecv(void* to, size_t count, Type type, int peer, Communicator* communicator, Stream stream) {
  return run(Message{false, to, count * width_of(type), peer}, communicator, stream);
}

}  // extern "C"
