#include "copy.h"

#include <cstring>

#include "half.h"

namespace dtrain {

#if defined(DTRAIN_X86)
namespace {

using Vector = char __attribute__((vector_size(32), aligned(1), may_alias));

__attribute__((target("avx2"))) void copy_vectors(char* to, const char* from, size_t bytes) {
  size_t i = 0;
  for (; i + 4 * sizeof(Vector) <= bytes; i += 4 * sizeof(Vector)) {
    const auto* source = reinterpret_cast<const Vector*>(from + i);
    auto* target = reinterpret_cast<Vector*>(to + i);
    const Vector a = source[0], b = source[1], c = source[2], d = source[3];
    target[0] = a, target[1] = b, target[2] = c, target[3] = d;
  }
  std::memcpy(to + i, from + i, bytes - i);
}

}  // namespace

void copy(void* to, const void* from, size_t bytes) {
  static const bool vectors = __builtin_cpu_supports("avx2") != 0;
  if (bytes == 0 || to == from) return;
  if (bytes < 2048 || !vectors) {
    std::memcpy(to, from, bytes);
  } else {
    copy_vectors(static_cast<char*>(to), static_cast<const char*>(from), bytes);
  }
}
#else
void copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}
#endif

}  // namespace dtrain
