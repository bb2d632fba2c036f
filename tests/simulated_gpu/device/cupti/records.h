// What CUPTI tells of: gathered as it happens, written into the reader's buffers at a flush.
#pragma once

#include <cupti.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../core/simulation.h"

namespace cupti {

class Records {
 public:
  static Records& get();

  bool* switch_of(CUpti_ActivityKind kind);  // null for kinds that are not recorded
  void register_buffers(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete);
  void register_clock(CUpti_TimestampCallbackFunc clock);
  void mute(bool driver, uint32_t id, bool muted);
  void flush();
  // How many records found no room since the last call.
  size_t take_dropped();

  bool wants(const simulation::Task& task) const;
  void call_begins(uint32_t correlation, const std::vector<std::pair<uint32_t, uint64_t>>& external_ids);
  void call_ended(const simulation::Call& call);
  void task_ended(const simulation::Task& task, int device, uint32_t stream);

 private:
  struct External {
    uint32_t kind;
    uint64_t id;
    uint32_t correlation;
  };
  struct Done {
    simulation::Task task;
    int device;
    uint32_t stream;
  };
  // Two readings at one moment: ours, and that of the clock the reader has registered.
  struct Reading {
    int64_t own = 0;
    uint64_t registered = 0;
  };

  // Whether a record finds room. Needs the lock.
  bool has_room();
  void hold_buffer();
  Reading read_clocks() const;

  std::mutex lock_;
  bool kernels_ = false, copies_ = false, sets_ = false, runtime_ = false, driver_ = false, external_ = false;
  CUpti_BuffersCallbackRequestFunc request_ = nullptr;
  CUpti_BuffersCallbackCompleteFunc complete_ = nullptr;
  CUpti_TimestampCallbackFunc clock_ = nullptr;
  Reading first_;
  std::set<std::pair<bool, uint32_t>> muted_;
  std::vector<External> externals_;
  std::vector<simulation::Call> calls_;
  std::vector<Done> done_;
  uint8_t* held_ = nullptr;
  size_t held_size_ = 0, dropped_ = 0, kernels_ended_ = 0;
};

// The bytes that a record takes in a buffer.
size_t size_of(CUpti_ActivityKind kind);
// A copy of the text that stays for good, as readers keep pointers into it.
const char* lasting(const std::string& text);

}  // namespace cupti
