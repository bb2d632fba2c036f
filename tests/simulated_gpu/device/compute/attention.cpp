// Fused attention, in torch's memory-efficient form and as flash attention: without dropout and windows, on sequences
// of one length.
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

// The argument of flash attention's kernels, up to what is needed.
struct Flash {
  char *query, *key, *value;
  int64_t query_batch, key_batch, value_batch, query_row, key_row, value_row, query_head, key_head, value_head;
  int32_t heads, key_heads, ratio;
  char *to, *partial;
  int64_t to_batch, to_row, to_head;
  char* shares;
  float *logarithms, *partial_logarithms;
  int32_t batches, queries, keys, new_keys, size, padded_queries, padded_keys, padded_size, rotary, all_queries;
  float scale, scale_log2;
  const int32_t *query_starts, *key_starts, *paddings, *key_lengths, *blocks;
  char *new_key, *new_value;
  int64_t new_strides[6];
  char *cosines, *sines;
  const int32_t *cache, *table;
  int64_t table_row;
  int32_t page;
  float kept;
  uint8_t kept_byte;
  float factors[2];
  int32_t left, right;
  float cap;
  Generator random;
  uint64_t* drawn;
  bool is_bfloat16, is_causal, is_cumulative, is_interleaved;
  int32_t splits;
  char* slopes;
  int64_t slopes_batch;
  bool without_padding, swapped;
};

struct FlashBackward : Flash {
  char *gradient, *to_query, *to_key, *to_value, *sums[3];
  int64_t gradient_batch, gradient_row, gradient_head, to_query_batch, to_key_batch, to_value_batch, to_query_row,
      to_key_row, to_value_row, to_query_head, to_key_head, to_value_head;
};

// A tensor of batches, heads and rows, by the distances of their elements.
struct Tensor {
  char* at;
  int64_t batch, head, row;

  int64_t first(int64_t of_batch, int64_t of_head) const { return of_batch * batch + of_head * head; }
};

// What all forms come to.
struct Attention {
  Type type;
  int64_t batches, heads, key_heads, queries, keys, size, value_size = 0;
  double scale = 1;
  bool masks = false;    // keys beyond the diagonal
  int64_t diagonal = 0;  // how many more keys than the first the first query sees
  Tensor query = {}, key = {}, value = {}, bias = {}, output = {}, gradient = {};
  Tensor to_query = {}, to_key = {}, to_value = {};
  float* logarithms = nullptr;
  int64_t logarithms_row = 0;  // of a head
};

using Rows = std::vector<double>;  // one after another

Rows rows(Type type, const Tensor& tensor, int64_t first, int64_t count, int64_t size) {
  Rows found(count * size);
  auto width = static_cast<int64_t>(width_of(type));
  for (int64_t i = 0; i < count; i++)
    load_many(type, tensor.at + (first + i * tensor.row) * width, width, static_cast<int>(size), &found[i * size]);
  return found;
}

void put(Writes& writes, Type type, const Tensor& tensor, int64_t first, const Rows& values, int64_t size) {
  auto width = static_cast<int64_t>(width_of(type));
  std::vector<char> bytes(size * width);
  for (size_t i = 0; i < values.size() / size; i++) {
    store_many(type, bytes.data(), &values[i * size], static_cast<int>(size));
    writes.put(tensor.at + (first + static_cast<int64_t>(i) * tensor.row) * width, bytes.data(), bytes.size());
  }
}

double dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
  return sum;
}

// One head of one batch.
struct Head {
  Rows query, key, value, shares;  // how each query weighs the keys
  std::vector<double> logarithms;  // of the sums
};

Head head_of(const Attention& given, int64_t batch, int64_t head) {
  int64_t of_keys = head / (given.heads / given.key_heads);
  Head found;
  found.query = rows(given.type, given.query, given.query.first(batch, head), given.queries, given.size);
  found.key = rows(given.type, given.key, given.key.first(batch, of_keys), given.keys, given.size);
  found.value = rows(given.type, given.value, given.value.first(batch, of_keys), given.keys, given.value_size);
  found.shares.resize(given.queries * given.keys);
  auto width = static_cast<int64_t>(width_of(given.type));
  for (int64_t i = 0; i < given.queries; i++) {
    double* row = &found.shares[i * given.keys];
    double most = -INFINITY, sum = 0;
    for (int64_t k = 0; k < given.keys; k++) {
      row[k] = dot(&found.query[i * given.size], &found.key[k * given.size], given.size) * given.scale;
      if (given.bias.at) {
        int64_t place = given.bias.first(batch, head) + i * given.bias.row + k;
        row[k] += load(given.type, given.bias.at + place * width);
      }
      if (given.masks && k > i + given.diagonal) row[k] = -INFINITY;
      most = std::isnan(row[k]) || row[k] > most ? row[k] : most;
    }
    for (int64_t k = 0; k < given.keys; k++) sum += row[k] = std::exp(row[k] - most);
    for (int64_t k = 0; k < given.keys; k++) row[k] /= sum;
    found.logarithms.push_back(most + std::log(sum));
  }
  return found;
}

void attend(const Attention& given, int64_t batch, int64_t head, Writes& writes) {
  Head found = head_of(given, batch, head);
  Rows result(given.queries * given.value_size);
  for (int64_t i = 0; i < given.queries; i++)
    for (int64_t k = 0; k < given.keys; k++)
      for (int64_t j = 0; j < given.value_size; j++)
        result[i * given.value_size + j] += found.shares[i * given.keys + k] * found.value[k * given.value_size + j];
  put(writes, given.type, given.output, given.output.first(batch, head), result, given.value_size);
  if (!given.logarithms) return;
  float* to = given.logarithms + (batch * given.heads + head) * given.logarithms_row;
  for (int64_t i = 0; i < given.queries; i++) writes.put(to + i, Type::float32, found.logarithms[i]);
}

void attend_backward(const Attention& given, int64_t batch, int64_t head, Writes& writes) {
  int64_t n = given.queries, m = given.keys, size = given.size, value_size = given.value_size;
  Head found = head_of(given, batch, head);
  Rows gradient = rows(given.type, given.gradient, given.gradient.first(batch, head), n, value_size);
  Rows output = rows(given.type, given.output, given.output.first(batch, head), n, value_size);
  Rows to_query(n * size), to_key(m * size), to_value(m * value_size);
  for (int64_t i = 0; i < n; i++) {
    double whole = dot(&gradient[i * value_size], &output[i * value_size], value_size);
    for (int64_t k = 0; k < m; k++) {
      double share = found.shares[i * m + k];
      double slope = share * (dot(&gradient[i * value_size], &found.value[k * value_size], value_size) - whole);
      for (int64_t j = 0; j < value_size; j++) to_value[k * value_size + j] += share * gradient[i * value_size + j];
      for (int64_t j = 0; j < size; j++) {
        to_query[i * size + j] += slope * given.scale * found.key[k * size + j];
        to_key[k * size + j] += slope * given.scale * found.query[i * size + j];
      }
    }
  }
  // Where heads share keys there are gradients of each, and torch adds them up.
  put(writes, given.type, given.to_query, given.to_query.first(batch, head), to_query, size);
  put(writes, given.type, given.to_key, given.to_key.first(batch, head), to_key, size);
  put(writes, given.type, given.to_value, given.to_value.first(batch, head), to_value, value_size);
}

Work over_heads(const Attention& given, void (*compute)(const Attention&, int64_t, int64_t, Writes&)) {
  return [=](Writes& writes) {
    for (int64_t batch = 0; batch < given.batches; batch++)
      for (int64_t head = 0; head < given.heads; head++) compute(given, batch, head, writes);
  };
}

// The memory-efficient form's mask begins at the upper left corner, or ends at the lower right one.
template <class Given>
Attention attention_of(const Given& given, Type type) {
  constexpr int lower_right = 2;
  Attention found{type, given.batches, given.heads, given.heads, given.queries, given.keys, given.size};
  found.value_size = given.value_size;
  found.scale = given.scale;
  found.masks = given.mask != 0;
  if (given.mask == lower_right) found.diagonal = given.keys - given.queries;
  found.query = {given.query, given.query_batch, given.query_head, given.query_row};
  found.key = {given.key, given.key_batch, given.key_head, given.key_row};
  found.value = {given.value, given.value_batch, given.value_head, given.value_row};
  found.bias = {given.bias, given.bias_batch, given.bias_head, given.bias_row};
  return found;
}

Work efficient_forward(const Forward& given, Type type) {
  if (given.query_starts || given.key_lengths || given.window || given.drops) return {};
  constexpr int64_t alignment = 32;  // of the logarithms' rows
  Attention found = attention_of(given, type);
  found.diagonal += given.diagonal;
  found.output = {given.to, int64_t{given.queries} * given.to_row, given.value_size, given.to_row};
  found.logarithms = given.logarithms;
  found.logarithms_row = (given.queries + alignment - 1) / alignment * alignment;
  return over_heads(found, attend);
}

Work efficient_backward(const Backward& given, Type type) {
  if (given.query_starts || given.window || given.dropout != 0 || given.to_bias) return {};
  Attention found = attention_of(given, type);
  int64_t row = int64_t{given.packed} * given.heads;
  found.output = {given.output, given.output_batch, given.output_head, int64_t{given.value_size} * given.heads};
  found.gradient = {given.gradient, given.gradient_batch, given.gradient_head, given.gradient_row};
  found.to_query = {given.to_query, given.to_query_batch, given.to_query_head, row * given.size};
  found.to_key = {given.to_key, given.to_key_batch, given.to_key_head, row * given.size};
  found.to_value = {given.to_value, given.to_value_batch, given.to_value_head, row * given.value_size};
  return over_heads(found, attend_backward);
}

// Of flash attention, where the mask ends at the lower right corner. `batches` is 0 where it cannot be computed.
Attention attention_of(const Flash& given) {
  bool windows = !given.is_causal && (given.left >= 0 || given.right >= 0);
  bool caches = given.new_key || given.cache || given.table || given.paddings || given.key_lengths;
  bool other = windows || caches || given.query_starts || given.slopes || given.cap != 0 || given.swapped;
  Attention found{given.is_bfloat16 ? Type::bfloat16 : Type::half, other || given.kept != 1 ? 0 : given.batches,
                  given.heads, given.key_heads, given.queries, given.keys, given.size};
  found.value_size = given.size;
  found.scale = given.scale;
  found.masks = given.is_causal;
  found.diagonal = given.keys - given.queries;
  found.query = {given.query, given.query_batch, given.query_head, given.query_row};
  found.key = {given.key, given.key_batch, given.key_head, given.key_row};
  found.value = {given.value, given.value_batch, given.value_head, given.value_row};
  found.output = {given.to, given.to_batch, given.to_head, given.to_row};
  found.logarithms = given.logarithms;
  found.logarithms_row = given.queries;
  return found;
}

Work flash(const Launch& launch) {
  const std::string& base = launch.parts.base;
  bool is_backward = base == "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel";
  // The kernels before and after a backward one prepare and move sums that only it needs, and parts of a forward one
  // are computed where they are combined.
  auto nothing = [](Writes&) {};
  if (base == "flash_bwd_dot_do_o_kernel" || base == "flash_bwd_convert_dq_kernel") return nothing;
  if (base != "flash_fwd_kernel" && base != "flash_fwd_splitkv_kernel" && !is_backward &&
      base != "flash_fwd_splitkv_combine_kernel")
    return {};
  auto given = launch.argument<Flash>(0);
  Attention found = attention_of(given);
  if (!found.batches) return {};
  if (!is_backward) {
    if (base == "flash_fwd_splitkv_kernel" && given.splits > 1) return nothing;
    return over_heads(found, attend);
  }
  auto all = launch.argument<FlashBackward>(0);
  found.gradient = {all.gradient, all.gradient_batch, all.gradient_head, all.gradient_row};
  found.to_query = {all.to_query, all.to_query_batch, all.to_query_head, all.to_query_row};
  found.to_key = {all.to_key, all.to_key_batch, all.to_key_head, all.to_key_row};
  found.to_value = {all.to_value, all.to_value_batch, all.to_value_head, all.to_value_row};
  return over_heads(found, attend_backward);
}

}  // namespace

Work attention(const Launch& launch) {
  if (!launch.parts.base.compare(0, 6, "flash_")) return flash(launch);
  bool is_forward = !launch.parts.base.compare(0, 13, "fmha_cutlassF");
  if (!is_forward && launch.parts.base.compare(0, 13, "fmha_cutlassB")) return {};
  std::string kind = launch.parts.base.substr(14, launch.parts.base.find('_', 14) - 14);
  Type type = kind == "bf16" ? Type::bfloat16 : kind == "f16" ? Type::half : Type::float32;
  if (is_forward) return efficient_forward(launch.argument<Forward>(0), type);
  return efficient_backward(launch.argument<Backward>(0), type);
}

}  // namespace compute
