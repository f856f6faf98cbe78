#include "calls.h"

#include <algorithm>

#include "codec.h"
#include "reduce.h"
#include "words.h"

namespace dtrain {

bool Call::operator==(const Call& other) const {
  return number == other.number && count == other.count && kind == other.kind && dtype == other.dtype &&
         op == other.op && wire == other.wire && root == other.root;
}

uint64_t Call::hash() const {
  const uint64_t kinds = static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 |
                         static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(wire) << 24 |
                         static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const uint64_t word : {number, count, kinds}) {
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

std::string Call::text() const {
  static const char* const kinds[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "barrier",    "all_to_all",     "gather",     "scatter"};
  if (kind > scatter) return "an unknown operation";
  std::string text = kinds[kind];
  if (kind == allreduce || kind == reduce_scatter) {
    text += std::string("(") + name_of(static_cast<Op>(op));
    if (wire != 255) text += wire == static_cast<uint8_t>(Wire::int8) ? ", int8 on the wire" : ", bf16 on the wire";
    return text + ") of " + with_commas(count) + " " + name_of(static_cast<Dtype>(dtype));
  }
  if (root >= 0) text += "(root " + std::to_string(root) + ")";
  return kind == barrier || count == kAnyCount ? text : text + " of " + with_commas(count) + " bytes";
}

std::string difference(const std::string& their_name, const Call& theirs, const std::string& own_name,
                       const Call& own) {
  return "rank " + their_name + " called " + theirs.text() + ", this rank (" + own_name + ") called " + own.text() +
         "; all ranks must make the same calls in the same order";
}

std::optional<Calls::Other> Calls::add(Call call) {
  std::lock_guard<std::mutex> lock(mutex_);
  chain_before_ = chain_;
  call.number = ++number_;
  chain_ = chain_ * 0xff51afd7ed558ccd ^ call.hash();
  made_[number_ % kKept] = call;
  since_ = Clock::now();
  told_ = false;
  if (heard_.empty()) return std::nullopt;
  std::optional<Other> other;
  for (const auto& [rank, theirs] : heard_) {
    if (theirs.number == number_ && theirs != call) other = Other{rank, theirs, call};
  }
  auto reached = [this](const auto& one) { return one.second.number <= number_; };
  heard_.erase(std::remove_if(heard_.begin(), heard_.end(), reached), heard_.end());
  return other;
}

std::optional<Calls::Other> Calls::hear(int rank, const Call& theirs) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (theirs.number > number_) {
    if (heard_.size() < kHeard) heard_.emplace_back(rank, theirs);
    return std::nullopt;
  }
  const Call& own = made_[theirs.number % kKept];
  if (own.number != theirs.number || own == theirs) return std::nullopt;
  return Other{rank, theirs, own};
}

std::optional<Call> Calls::untold(Clock::duration age) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (told_ || number_ == 0 || Clock::now() - since_ < age) return std::nullopt;
  told_ = true;
  return made_[number_ % kKept];
}

Header Calls::header(const Call& call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Header header;
  header.call = call;
  if (number_ > 1) header.before = made_[(number_ - 1) % kKept];
  header.chain = chain_before_;
  return header;
}

}  // namespace dtrain
