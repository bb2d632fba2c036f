// Numbers in memory: their types, and how they are read and written.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../core/numbers.h"
#include "../core/settings.h"

namespace compute {

// torch's numbers of types.
enum class Type : int8_t {
  uint8 = 0,
  int8 = 1,
  int16 = 2,
  int32 = 3,
  int64 = 4,
  half = 5,
  float32 = 6,
  float64 = 7,
  boolean = 11,
  bfloat16 = 15
};

size_t width_of(Type type);
// Of the type in which torch computes with it.
Type wide(Type type);
// "float", "BFloat16 const*" and so on.
std::optional<Type> type_named(const std::string& name);

template <class Number>
Number read(const void* from) {
  Number value;
  memcpy(&value, from, sizeof value);
  return value;
}

// Integers are exact up to 2^53.
double load(Type type, const void* from);
void store(Type type, void* to, double value);
// Many at once, `stride` bytes apart.
void load_many(Type type, const char* from, int64_t stride, int count, double* to);
void store_many(Type type, char* to, const double* values, int count);

// How often anything was written so far.
EXPORTED uint64_t changes();
EXPORTED void changed();

// What a kernel is going to write. Inputs are read when a kernel begins, and results are in memory when it ends. In
// between they are spoiled: who reads them without a wait reads no number.
class Writes {
 public:
  void put(void* to, const void* bytes, size_t size);
  void put(void* to, Type type, double value);
  void spoil();
  void apply() const;
  // Whether it would write the same if it began now, and nobody has written to where it writes. It is spoiled before
  // and after.
  bool would_repeat(const std::function<void(Writes&)>& work) const;

 private:
  struct Run {
    char* to;
    size_t at, size;
  };
  std::vector<Run> runs_;
  std::vector<char> bytes_, before_;  // what is to be there, and what was there
};

}  // namespace compute
