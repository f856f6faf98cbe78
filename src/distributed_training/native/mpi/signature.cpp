// What a rank called, in words, and whether two ranks called the same.
#include <string>

#include "host_memory.h"
#include "words.h"

namespace dtrain {

bool Signature::operator==(const Signature& other) const {
  return sequence == other.sequence && count == other.count && kind == other.kind && dtype == other.dtype &&
         op == other.op && between_hosts == other.between_hosts && root == other.root && divisor == other.divisor;
}

uint64_t Signature::hash() const {
  const uint64_t kinds = static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 |
                         static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(between_hosts) << 24 |
                         static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const uint64_t word : {sequence, count, kinds, static_cast<uint64_t>(divisor)}) {
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

std::string Signature::text() const {
  const std::string elements = " of " + with_commas(count) + " " + name_of(dtype);
  const std::string divided = divisor > 0 ? std::string(name_of(op)) + " over " + std::to_string(divisor) : name_of(op);
  const std::string where = between_hosts != 0 ? " between hosts" : "";
  if (sequence == 0) return "joining the ranks of this host";
  const std::string bytes = " of " + with_commas(count) + " bytes" + where;
  switch (kind) {
    case Kind::allreduce: return "all_reduce(" + divided + ")" + elements + where;
    case Kind::reduce_scatter: return "reduce_scatter(" + divided + ")" + elements + where;
    case Kind::allgather: return "all_gather" + bytes;
    case Kind::broadcast: return "broadcast(root " + std::to_string(root) + ")" + bytes;
    case Kind::barrier: return "barrier";
    case Kind::alltoall: return "all_to_all";  // its pieces have sizes of their own
    case Kind::gather: return "gather(root " + std::to_string(root) + ")" + bytes;
    case Kind::scatter: return "scatter(root " + std::to_string(root) + ")" + bytes;
  }
  return "an unknown operation";
}

}  // namespace dtrain
