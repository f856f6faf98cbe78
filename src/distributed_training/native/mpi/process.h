// Whether another process of this machine still lives.
#pragma once

#include <cstdint>

namespace dtrain {

// When the process was started, in a unit of its own: with the pid it names a process for good, since pids come again.
// 0 where there is no such process or where it has ended and only waits to be collected.
uint64_t process_start(int pid);

// The processors that this process may use, one bit each; none where the system does not say.
constexpr int kProcessorWords = 16;
void usable_processors(uint64_t (&words)[kProcessorWords]);

}  // namespace dtrain
