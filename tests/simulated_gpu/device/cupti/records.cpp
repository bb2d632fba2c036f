#include "records.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "../core/faults.h"

namespace cupti {
namespace {

using simulation::Fault, simulation::fault, simulation::Kind;

constexpr size_t aligned(size_t size) { return (size + 7) & ~size_t{7}; }

uint64_t system_clock() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time.tv_sec * 1'000'000'000ULL + time.tv_nsec;
}

// Writes records one after the other, into as many buffers as they need.
class Writer {
 public:
  Writer(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete, uint8_t* buffer,
         size_t size)
      : request_(request), complete_(complete), buffer_(buffer), size_(size) {}
  ~Writer() { close(); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  template <class Record>
  void write(const Record& record) {
    if (!buffer_ || used_ + aligned(sizeof record) > size_) {
      close();
      size_t most_records = 0;
      request_(&buffer_, &size_, &most_records);
      used_ = 0;
      if (!buffer_ || size_ < aligned(sizeof record)) return;
    }
    memcpy(buffer_ + used_, &record, sizeof record);
    used_ += aligned(sizeof record);
  }

 private:
  void close() {
    if (buffer_) complete_(nullptr, 0, buffer_, size_, used_);
    buffer_ = nullptr;
  }
  CUpti_BuffersCallbackRequestFunc request_;
  CUpti_BuffersCallbackCompleteFunc complete_;
  uint8_t* buffer_;
  size_t size_, used_ = 0;
};

// What all records of tasks share.
template <class Record>
void place(Record& record, CUpti_ActivityKind kind, const simulation::Task& task, int device, uint32_t stream) {
  record.kind = kind;
  record.deviceId = static_cast<uint32_t>(device);
  record.contextId = 1;
  record.streamId = stream;
  record.correlationId = task.correlation;
  record.graphId = task.graph;
  record.graphNodeId = task.node;
}

uint8_t copy_kind(int runtime_kind) {
  switch (runtime_kind) {
    case 1: return CUPTI_ACTIVITY_MEMCPY_KIND_HTOD;
    case 2: return CUPTI_ACTIVITY_MEMCPY_KIND_DTOH;
    default: return CUPTI_ACTIVITY_MEMCPY_KIND_DTOD;
  }
}

}  // namespace

Records& Records::get() {
  static Records& once = *new Records;
  return once;
}

bool* Records::switch_of(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
    case CUPTI_ACTIVITY_KIND_KERNEL: return &kernels_;
    case CUPTI_ACTIVITY_KIND_MEMCPY: return &copies_;
    case CUPTI_ACTIVITY_KIND_MEMSET: return &sets_;
    case CUPTI_ACTIVITY_KIND_RUNTIME: return &runtime_;
    case CUPTI_ACTIVITY_KIND_DRIVER: return &driver_;
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return &external_;
    default: return nullptr;
  }
}

void Records::register_buffers(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete) {
  std::lock_guard<std::mutex> held(lock_);
  request_ = request;
  complete_ = complete;
  if (!first_.own) first_ = read_clocks();
}

void Records::register_clock(CUpti_TimestampCallbackFunc clock) {
  std::lock_guard<std::mutex> held(lock_);
  clock_ = clock;
  first_ = read_clocks();
}

void Records::mute(bool driver, uint32_t id, bool muted) {
  std::lock_guard<std::mutex> held(lock_);
  if (muted) muted_.insert({driver, id});
  else muted_.erase({driver, id});
}

// The tightest of a few readings.
Records::Reading Records::read_clocks() const {
  Reading best;
  int64_t shortest = INT64_MAX;
  for (int i = 0; i < 15; i++) {
    int64_t before = simulation::now();
    uint64_t registered = clock_ ? clock_() : system_clock();
    int64_t after = simulation::now();
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = {before + (after - before) / 2, registered};
  }
  return best;
}

// Readers flush only if a buffer has been asked for, so the first record asks for one, as CUPTI does.
void Records::hold_buffer() {
  {
    std::lock_guard<std::mutex> held(lock_);
    if (held_ || !request_) return;
  }
  uint8_t* buffer = nullptr;
  size_t size = 0, most_records = 0;
  request_(&buffer, &size, &most_records);  // not under the lock: the reader has locks of its own
  std::lock_guard<std::mutex> held(lock_);
  held_ = buffer;
  held_size_ = size;
}

bool Records::wants(const simulation::Task& task) const {
  switch (task.kind) {
    case Kind::kernel:
    case Kind::collective: return kernels_;
    case Kind::memcpy: return copies_;
    case Kind::memset: return sets_;
    default: return false;
  }
}

void Records::call_begins(uint32_t correlation, const std::vector<std::pair<uint32_t, uint64_t>>& external_ids) {
  if (kernels_) hold_buffer();
  if (!external_ || external_ids.empty()) return;
  std::lock_guard<std::mutex> held(lock_);
  std::set<uint32_t> kinds;  // of each kind the innermost
  for (auto one = external_ids.rbegin(); one != external_ids.rend(); ++one) {
    if (kinds.insert(one->first).second && has_room()) externals_.push_back({one->first, one->second, correlation});
  }
}

void Records::call_ended(const simulation::Call& call) {
  if (!(call.driver ? driver_ : runtime_)) return;
  hold_buffer();
  std::lock_guard<std::mutex> held(lock_);
  if (!muted_.count({call.driver, call.id}) && has_room()) calls_.push_back(call);
}

void Records::task_ended(const simulation::Task& task, int device, uint32_t stream) {
  std::lock_guard<std::mutex> held(lock_);
  if (int every = fault(Fault::lost_records); every && ++kernels_ended_ % static_cast<size_t>(every) == 0) return;
  if (!has_room()) return;
  done_.push_back({task, device, stream});
  simulation::Task& kept = done_.back().task;
  kept.effect = nullptr;
  kept.meeting = nullptr;
  kept.moment = nullptr;
  kept.at_begin = nullptr;
  kept.renew = nullptr;
}

bool Records::has_room() {
  auto most = static_cast<size_t>(fault(Fault::overflow));
  if (!most || externals_.size() + calls_.size() + done_.size() < most) return true;
  dropped_++;
  return false;
}

size_t Records::take_dropped() {
  std::lock_guard<std::mutex> held(lock_);
  return std::exchange(dropped_, 0);
}

void Records::flush() {
  std::vector<External> externals;
  std::vector<simulation::Call> calls;
  std::vector<Done> done;
  uint8_t* buffer;
  size_t size;
  Reading last;
  {
    std::lock_guard<std::mutex> held(lock_);
    if (!request_ || !complete_) return;
    externals.swap(externals_);
    calls.swap(calls_);
    done.swap(done_);
    int64_t in_time = simulation::now() - 1000LL * fault(Fault::late_records);
    auto late = std::stable_partition(done.begin(), done.end(), [=](const Done& one) { return one.task.end <= in_time; });
    std::move(late, done.end(), std::back_inserter(done_));
    done.erase(late, done.end());
    buffer = held_;
    size = held_size_;
    held_ = nullptr;
    if (!buffer && externals.empty() && calls.empty() && done.empty()) return;
    last = read_clocks();
  }
  // The registered clock may count anything: torch's counts ticks of the processor.
  double pace = last.own > first_.own ? static_cast<double>(last.registered - first_.registered) /
                                            static_cast<double>(last.own - first_.own)
                                      : 1;
  auto stamp = [&](int64_t time) {
    return last.registered - static_cast<int64_t>(static_cast<double>(last.own - time) * pace);
  };
  Writer writer(request_, complete_, buffer, size);
  for (const External& one : externals) {
    CUpti_ActivityExternalCorrelation record{};
    record.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
    record.externalKind = static_cast<CUpti_ExternalCorrelationKind>(one.kind);
    record.externalId = one.id;
    record.correlationId = one.correlation;
    writer.write(record);
  }
  for (const simulation::Call& one : calls) {
    CUpti_ActivityAPI record{};
    record.kind = one.driver ? CUPTI_ACTIVITY_KIND_DRIVER : CUPTI_ACTIVITY_KIND_RUNTIME;
    record.cbid = one.id;
    record.start = stamp(one.start);
    record.end = stamp(one.end);
    record.processId = static_cast<uint32_t>(getpid());
    record.threadId = one.thread;
    record.correlationId = one.correlation;
    writer.write(record);
  }
  for (const Done& one : done) {
    const simulation::Task& task = one.task;
    uint64_t start = stamp(task.start), end = stamp(task.end);
    if (task.kind == Kind::memcpy) {
      CUpti_ActivityMemcpy6 record{};
      place(record, CUPTI_ACTIVITY_KIND_MEMCPY, task, one.device, one.stream);
      record.copyKind = copy_kind(task.copy_kind);
      record.srcKind = task.copy_kind == 1 ? CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
      record.dstKind = task.copy_kind == 2 ? CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
      record.bytes = task.bytes;
      record.copyCount = 1;
      record.start = start;
      record.end = end;
      writer.write(record);
    } else if (task.kind == Kind::memset) {
      CUpti_ActivityMemset4 record{};
      place(record, CUPTI_ACTIVITY_KIND_MEMSET, task, one.device, one.stream);
      record.value = static_cast<uint32_t>(task.copy_kind);
      record.bytes = task.bytes;
      record.memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
      record.start = start;
      record.end = end;
      writer.write(record);
    } else {
      CUpti_ActivityKernel10 record{};
      place(record, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, task, one.device, one.stream);
      record.name = lasting(task.name);
      record.registersPerThread = task.registers;
      record.gridX = task.grid[0], record.gridY = task.grid[1], record.gridZ = task.grid[2];
      record.blockX = task.block[0], record.blockY = task.block[1], record.blockZ = task.block[2];
      record.dynamicSharedMemory = static_cast<int32_t>(task.shared_bytes);
      record.start = start;
      record.end = record.completed = end;
      writer.write(record);
    }
  }
}

size_t size_of(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return aligned(sizeof(CUpti_ActivityKernel10));
    case CUPTI_ACTIVITY_KIND_MEMCPY: return aligned(sizeof(CUpti_ActivityMemcpy6));
    case CUPTI_ACTIVITY_KIND_MEMSET: return aligned(sizeof(CUpti_ActivityMemset4));
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return aligned(sizeof(CUpti_ActivityExternalCorrelation));
    default: return aligned(sizeof(CUpti_ActivityAPI));
  }
}

const char* lasting(const std::string& text) {
  static std::mutex& lock = *new std::mutex;
  static std::set<std::string>& texts = *new std::set<std::string>;
  std::lock_guard<std::mutex> held(lock);
  return texts.insert(text).first->c_str();
}

}  // namespace cupti
