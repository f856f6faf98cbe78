// Copying between private and shared memory.
#pragma once

#include <cstddef>

namespace dtrain {

// As memcpy; the same pointer twice, and nothing from nowhere, are fine. Long copies use plain vector moves: libraries
// prefer the processor's string instruction, which is slower on some for memory that another core has just written.
void copy(void* to, const void* from, size_t bytes);

}  // namespace dtrain
