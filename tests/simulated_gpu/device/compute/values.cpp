#include "values.h"

#include <algorithm>
#include <atomic>

namespace compute {
namespace {

constexpr char spoiled = -1;  // of all types that have it, no number
std::atomic<uint64_t> number_of_changes{0};

using simulation::BFloat16;
using simulation::Half;

template <class Stored, class Convert>
void load_as(const char* from, int64_t stride, int count, double* to, Convert convert) {
  for (int i = 0; i < count; i++) to[i] = convert(read<Stored>(from + i * stride));
}

template <class Stored, class Convert>
void store_as(char* to, const double* values, int count, Convert convert) {
  for (int i = 0; i < count; i++) {
    Stored value = convert(values[i]);
    memcpy(to + i * sizeof value, &value, sizeof value);
  }
}

template <class Stored>
Stored whole(double value) {
  return static_cast<Stored>(static_cast<int64_t>(value));
}

}  // namespace

uint64_t changes() { return number_of_changes; }
void changed() { number_of_changes++; }

size_t width_of(Type type) {
  switch (type) {
    case Type::uint8:
    case Type::int8:
    case Type::boolean: return 1;
    case Type::int16:
    case Type::half:
    case Type::bfloat16: return 2;
    case Type::int64:
    case Type::float64: return 8;
    default: return 4;
  }
}

Type wide(Type type) { return type == Type::half || type == Type::bfloat16 ? Type::float32 : type; }

std::optional<Type> type_named(const std::string& name) {
  std::string plain = name.substr(0, name.find_first_of("*&"));
  for (const char* part : {"const ", " const"})
    if (size_t at = plain.find(part); at != std::string::npos) plain.erase(at, 6);
  while (!plain.empty() && plain.back() == ' ') plain.pop_back();
  if (plain == "float") return Type::float32;
  if (plain == "double") return Type::float64;
  if (plain == "BFloat16") return Type::bfloat16;
  if (plain == "Half") return Type::half;
  if (plain == "long" || plain == "long long") return Type::int64;
  if (plain == "int") return Type::int32;
  if (plain == "short") return Type::int16;
  if (plain == "signed char") return Type::int8;
  if (plain == "unsigned char") return Type::uint8;
  if (plain == "bool") return Type::boolean;
  // Only moved: any type of that width does that whose numbers are kept bit by bit.
  if (plain == "OpaqueType<1>") return Type::uint8;
  if (plain == "OpaqueType<2>" || plain == "unsigned short") return Type::int16;
  if (plain == "OpaqueType<4>" || plain == "unsigned int") return Type::int32;
  if (plain == "OpaqueType<8>" || plain == "unsigned long") return Type::float64;
  return {};
}

double load(Type type, const void* from) {
  double value;
  load_many(type, static_cast<const char*>(from), 0, 1, &value);
  return value;
}

void store(Type type, void* to, double value) { store_many(type, static_cast<char*>(to), &value, 1); }

void load_many(Type type, const char* from, int64_t stride, int count, double* to) {
  auto same = [](auto value) { return static_cast<double>(value); };
  switch (type) {
    case Type::uint8: return load_as<uint8_t>(from, stride, count, to, same);
    case Type::boolean: return load_as<uint8_t>(from, stride, count, to, [](uint8_t v) { return double(v != 0); });
    case Type::int8: return load_as<int8_t>(from, stride, count, to, same);
    case Type::int16: return load_as<int16_t>(from, stride, count, to, same);
    case Type::int32: return load_as<int32_t>(from, stride, count, to, same);
    case Type::int64: return load_as<int64_t>(from, stride, count, to, same);
    case Type::half: return load_as<Half>(from, stride, count, to, Half::widen);
    case Type::bfloat16: return load_as<BFloat16>(from, stride, count, to, BFloat16::widen);
    case Type::float32: return load_as<float>(from, stride, count, to, same);
    case Type::float64: return load_as<double>(from, stride, count, to, same);
  }
}

void store_many(Type type, char* to, const double* values, int count) {
  auto narrow = [](double value) { return static_cast<float>(value); };
  switch (type) {
    case Type::uint8: return store_as<uint8_t>(to, values, count, whole<uint8_t>);
    case Type::boolean: return store_as<uint8_t>(to, values, count, [](double v) { return uint8_t(v != 0); });
    case Type::int8: return store_as<int8_t>(to, values, count, whole<int8_t>);
    case Type::int16: return store_as<int16_t>(to, values, count, whole<int16_t>);
    case Type::int32: return store_as<int32_t>(to, values, count, whole<int32_t>);
    case Type::int64: return store_as<int64_t>(to, values, count, whole<int64_t>);
    case Type::half: return store_as<Half>(to, values, count, [&](double v) { return Half::narrow(narrow(v)); });
    case Type::bfloat16:
      return store_as<BFloat16>(to, values, count, [&](double v) { return BFloat16::narrow(narrow(v)); });
    case Type::float32: return store_as<float>(to, values, count, narrow);
    case Type::float64: return store_as<double>(to, values, count, [](double v) { return v; });
  }
}

void Writes::put(void* to, const void* bytes, size_t size) {
  if (!size) return;
  auto* target = static_cast<char*>(to);
  size_t at = bytes_.size();
  bytes_.resize(at + size);
  memcpy(bytes_.data() + at, bytes, size);
  if (!runs_.empty() && runs_.back().to + runs_.back().size == target) runs_.back().size += size;
  else runs_.push_back({target, at, size});
}

void Writes::put(void* to, Type type, double value) {
  char bytes[8];
  store(type, bytes, value);
  put(to, bytes, width_of(type));
}

void Writes::spoil() {
  if (before_.empty()) before_.resize(bytes_.size());
  for (const Run& run : runs_) memcpy(&before_[run.at], run.to, run.size);
  for (const Run& run : runs_) memset(run.to, spoiled, run.size);
  changed();
}

void Writes::apply() const {
  for (const Run& run : runs_) memcpy(run.to, bytes_.data() + run.at, run.size);
  changed();
}

bool Writes::would_repeat(const std::function<void(Writes&)>& work) const {
  for (const Run& run : runs_)
    if (std::any_of(run.to, run.to + run.size, [](char byte) { return byte != spoiled; })) return false;
  for (const Run& run : runs_) memcpy(run.to, &before_[run.at], run.size);
  Writes again;
  work(again);
  for (const Run& run : runs_) memset(run.to, spoiled, run.size);
  return again.bytes_ == bytes_;
}

}  // namespace compute
