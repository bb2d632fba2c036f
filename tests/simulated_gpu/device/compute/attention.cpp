// Fused attention, in torch's memory-efficient form: without dropout and windows, on sequences of one length.
#include <cmath>

#include "compute.h"

namespace compute {
namespace {

struct Generator {  // torch's state of random numbers
  uint64_t seed, offset, offset_in_graph;
  bool captured;
};

// The one argument of the forward kernel, as torch declares it.
struct Forward {
  char *query, *key, *value, *bias;
  const int32_t *query_starts, *key_starts, *key_lengths;
  uint32_t diagonal;
  char *to, *partial;
  float* logarithms;
  int32_t window;
  float scale;
  int32_t size, value_size, queries, keys, all_keys;
  uint8_t mask;
  int32_t query_row, key_row, value_row, bias_row, to_row, query_head, key_head, value_head;
  int64_t bias_head, query_batch, key_batch, value_batch, bias_batch;
  int32_t batches, heads;
  bool drops;
};

// The same of the backward kernel.
struct Backward {
  char *query, *key, *value, *bias;
  const float* logarithms;
  char *output, *gradient;
  float* delta;
  const int32_t *query_starts, *key_starts;
  char *to_query, *to_key, *to_value, *to_bias, *workspace, *workspace_value, *workspace_query;
  int32_t window;
  float scale;
  int32_t size, value_size, queries, keys, heads;
  uint8_t mask;
  int64_t query_row, key_row, value_row, bias_row, gradient_row, to_bias_row;
  int8_t packed;
  Generator random;
  unsigned long long random_offset;
  float dropout;
  int64_t output_head;
  int32_t query_head, key_head, value_head;
  int64_t bias_head, output_batch, query_batch, key_batch, value_batch, bias_batch;
  int64_t logarithms_batch, logarithms_head, delta_batch, delta_head;
  int32_t batches;
  int16_t splits;
  int64_t gradient_batch, to_query_batch, to_key_batch, to_value_batch, to_bias_batch;
  int64_t gradient_head, to_query_head, to_key_head, to_value_head, to_bias_head;
};

using Rows = std::vector<double>;  // one after another

Rows rows(Type type, const char* at, int64_t first, int64_t row, int64_t count, int64_t size) {
  Rows found(count * size);
  auto width = static_cast<int64_t>(width_of(type));
  for (int64_t i = 0; i < count; i++)
    load_many(type, at + (first + i * row) * width, width, static_cast<int>(size), &found[i * size]);
  return found;
}

void put(Writes& writes, Type type, char* at, int64_t first, int64_t row, const Rows& values, int64_t size) {
  auto width = static_cast<int64_t>(width_of(type));
  std::vector<char> bytes(size * width);
  for (size_t i = 0; i < values.size() / size; i++) {
    store_many(type, bytes.data(), &values[i * size], static_cast<int>(size));
    writes.put(at + (first + static_cast<int64_t>(i) * row) * width, bytes.data(), bytes.size());
  }
}

double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
  return sum;
}

// How one head weighs its keys, for each query; `logarithms` are those of the sums.
template <class Given>
Rows weights(const Given& given, Type type, const Rows& query, const Rows& key, int64_t bias_first, int64_t diagonal,
             std::vector<double>& logarithms) {
  Rows found(static_cast<int64_t>(given.queries) * given.keys);
  logarithms.assign(given.queries, -INFINITY);
  auto width = static_cast<int64_t>(width_of(type));
  for (int64_t i = 0; i < given.queries; i++) {
    double* row = &found[i * given.keys];
    double most = -INFINITY, sum = 0;
    for (int64_t k = 0; k < given.keys; k++) {
      row[k] = dot(&query[i * given.size], &key[k * given.size], given.size) * given.scale;
      if (given.bias) row[k] += load(type, given.bias + (bias_first + i * given.bias_row + k) * width);
      if (given.mask && k > i + diagonal) row[k] = -INFINITY;
      most = std::isnan(row[k]) || row[k] > most ? row[k] : most;
    }
    for (int64_t k = 0; k < given.keys; k++) sum += row[k] = std::exp(row[k] - most);
    for (int64_t k = 0; k < given.keys; k++) row[k] /= sum;
    logarithms[i] = most + std::log(sum);
  }
  return found;
}

// The mask begins at the upper left corner, or ends at the lower right one.
template <class Given>
int64_t diagonal_of(const Given& given) {
  constexpr int lower_right = 2;
  return given.mask == lower_right ? given.keys - given.queries : 0;
}

void attend(const Forward& given, Type type, Writes& writes) {
  constexpr int64_t alignment = 32;  // of the logarithms' rows
  int64_t padded = (given.queries + alignment - 1) / alignment * alignment;
  for (int64_t batch = 0; batch < given.batches; batch++) {
    for (int64_t head = 0; head < given.heads; head++) {
      Rows query = rows(type, given.query, batch * given.query_batch + head * given.query_head, given.query_row,
                        given.queries, given.size);
      Rows key =
          rows(type, given.key, batch * given.key_batch + head * given.key_head, given.key_row, given.keys, given.size);
      Rows value = rows(type, given.value, batch * given.value_batch + head * given.value_head, given.value_row,
                        given.keys, given.value_size);
      std::vector<double> logarithms;
      int64_t bias_first = batch * given.bias_batch + head * given.bias_head;
      Rows shares =
          weights(given, type, query, key, bias_first, given.diagonal + diagonal_of(given), logarithms);
      Rows result(static_cast<int64_t>(given.queries) * given.value_size);
      for (int64_t i = 0; i < given.queries; i++)
        for (int64_t k = 0; k < given.keys; k++)
          for (int64_t j = 0; j < given.value_size; j++)
            result[i * given.value_size + j] += shares[i * given.keys + k] * value[k * given.value_size + j];
      put(writes, type, given.to, batch * given.queries * given.to_row + head * given.value_size, given.to_row, result,
          given.value_size);
      if (!given.logarithms) continue;
      for (int64_t i = 0; i < given.queries; i++)
        writes.put(given.logarithms + (batch * given.heads + head) * padded + i, Type::float32, logarithms[i]);
    }
  }
}

void attend_backward(const Backward& given, Type type, Writes& writes) {
  for (int64_t batch = 0; batch < given.batches; batch++) {
    for (int64_t head = 0; head < given.heads; head++) {
      int64_t n = given.queries, m = given.keys, size = given.size, value_size = given.value_size;
      Rows query =
          rows(type, given.query, batch * given.query_batch + head * given.query_head, given.query_row, n, size);
      Rows key = rows(type, given.key, batch * given.key_batch + head * given.key_head, given.key_row, m, size);
      Rows value =
          rows(type, given.value, batch * given.value_batch + head * given.value_head, given.value_row, m, value_size);
      Rows gradient = rows(type, given.gradient, batch * given.gradient_batch + head * given.gradient_head,
                           given.gradient_row, n, value_size);
      Rows output = rows(type, given.output, batch * given.output_batch + head * given.output_head,
                         value_size * given.heads, n, value_size);
      std::vector<double> logarithms;
      Rows shares = weights(given, type, query, key, batch * given.bias_batch + head * given.bias_head,
                            diagonal_of(given), logarithms);
      Rows to_query(n * size), to_key(m * size), to_value(m * value_size);
      for (int64_t i = 0; i < n; i++) {
        double whole = dot(&gradient[i * value_size], &output[i * value_size], value_size);
        for (int64_t k = 0; k < m; k++) {
          double share = shares[i * m + k];
          double slope = share * (dot(&gradient[i * value_size], &value[k * value_size], value_size) - whole);
          for (int64_t j = 0; j < value_size; j++) to_value[k * value_size + j] += share * gradient[i * value_size + j];
          for (int64_t j = 0; j < size; j++) {
            to_query[i * size + j] += slope * given.scale * key[k * size + j];
            to_key[k * size + j] += slope * given.scale * query[i * size + j];
          }
        }
      }
      int64_t row = static_cast<int64_t>(given.packed) * given.heads;
      put(writes, type, given.to_query, batch * given.to_query_batch + head * given.to_query_head, row * size, to_query,
          size);
      put(writes, type, given.to_key, batch * given.to_key_batch + head * given.to_key_head, row * size, to_key, size);
      put(writes, type, given.to_value, batch * given.to_value_batch + head * given.to_value_head, row * value_size,
          to_value, value_size);
    }
  }
}

}  // namespace

Work attention(const Launch& launch) {
  bool is_forward = !launch.parts.base.compare(0, 13, "fmha_cutlassF");
  if (!is_forward && launch.parts.base.compare(0, 13, "fmha_cutlassB")) return {};
  std::string kind = launch.parts.base.substr(14, launch.parts.base.find('_', 14) - 14);
  Type type = kind == "bf16" ? Type::bfloat16 : kind == "f16" ? Type::half : Type::float32;
  if (is_forward) {
    auto given = launch.argument<Forward>(0);
    if (given.query_starts || given.key_lengths || given.window || given.drops) return {};
    return [=](Writes& writes) { attend(given, type, writes); };
  }
  auto given = launch.argument<Backward>(0);
  if (given.query_starts || given.window || given.dropout != 0 || given.to_bias) return {};
  return [=](Writes& writes) { attend_backward(given, type, writes); };
}

}  // namespace compute
