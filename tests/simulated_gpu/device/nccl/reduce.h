// The arithmetic of collectives.
#pragma once

#include <vector>

#include "types.h"

namespace nccl {

// Reduces `count` numbers of each source into `to`. `scale` is what a custom operation multiplies each number by.
void reduce(void* to, const std::vector<const char*>& sources, size_t count, Type type, int operation, double scale);
// One number as a double, for the scale of a custom operation.
double read_number(const void* address, Type type);

}  // namespace nccl
