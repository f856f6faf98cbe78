#include "channel.h"

#include <algorithm>
#include <cstring>

namespace dtrain {

namespace {

// Broadcasts up to here go down a tree.
constexpr size_t kFlatBroadcast = 64 * 1024;

}  // namespace

Channel::Channel(MPI_Comm comm, std::vector<int> names, const Calls& calls, std::function<void()> poll)
    : comm_(comm), names_(std::move(names)), calls_(calls), poll_(std::move(poll)) {
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  slots_.resize(kSlot * size_);
  headers_out_.resize(size_);
}

std::vector<int> Channel::others() const {
  std::vector<int> others;
  for (int i = 1; i < size_; ++i) others.push_back((rank_ + i) % size_);
  return others;
}

uint8_t* Channel::scratch(std::vector<uint8_t>& buffer, size_t bytes) {
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer.data();
}

Call Channel::numbered(Call call) {
  call.number = ++number_;
  return call;
}

void Channel::wait(Requests& requests, Clock::time_point deadline) {
  Backoff backoff;
  for (unsigned turn = 1; !requests.test(); ++turn) {
    if (turn % 16 == 0) {
      poll_();
      if (Clock::now() > deadline) {
        auto open = requests.open();
        std::string text = "no answer in time from rank";
        for (size_t i = 0; i < open.size(); ++i) text += (i ? ", " : open.size() > 1 ? "s " : " ") + name(open[i]);
        throw Late(text, open);
      }
    }
    backoff.pause();
  }
}

void Channel::receive_header(Requests& requests, int peer) {
  std::memset(slot(peer), 0, sizeof(Header));
  requests.receive(comm_, peer, tag(), slot(peer), kSlot);
}

void Channel::send_header(Requests& requests, int peer, const Call& call) {
  headers_out_[peer] = calls_.header(call);
  requests.send(comm_, peer, tag(), &headers_out_[peer], sizeof(Header));
}

void Channel::check_headers(const Call& call, const std::vector<int>& from) const {
  const Header own = calls_.header(call);
  for (int peer : from) {
    Header theirs;
    std::memcpy(&theirs, slots_.data() + kSlot * peer, sizeof(Header));
    if (theirs.call.number == 0) continue;  // nothing has come yet
    if (theirs.call != call) throw Differs(difference(name(peer), theirs.call, name(rank_), call));
    if (theirs.chain == own.chain) continue;
    throw Differs("before this " + call.text() + ", " +
                  (theirs.before == own.before
                       ? "rank " + name(peer) + " made other calls than this rank (" + name(rank_) + ")"
                       : difference(name(peer), theirs.before, name(rank_), own.before)));
  }
}

void Channel::exchange(Call call, const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                       Clock::time_point deadline) {
  call = numbered(call);
  const bool uneven = call.kind == Call::alltoall;  // each pair of ranks has a size of its own
  Requests requests;
  auto described = [&](const Piece& piece) {
    Call one = call;
    if (uneven) one.count = piece.bytes;
    return one;
  };
  for (const auto& piece : receives) {
    if (piece.peer == rank_) continue;
    receive_header(requests, piece.peer);
    if (piece.bytes) requests.receive(comm_, piece.peer, tag() + 1, piece.data, piece.bytes, cut_of(piece.bytes));
  }
  for (const auto& piece : sends) {
    if (piece.peer == rank_) continue;
    send_header(requests, piece.peer, described(piece));
    if (piece.bytes) requests.send(comm_, piece.peer, tag() + 1, piece.data, piece.bytes, cut_of(piece.bytes));
  }
  for (const auto& mine : sends) {
    if (mine.peer != rank_) continue;
    for (const auto& own : receives) {
      if (own.peer == rank_ && own.data != mine.data) std::memcpy(own.data, mine.data, std::min(mine.bytes, own.bytes));
    }
  }
  explained([&] { wait(requests, deadline); },
            [&] {
              for (const auto& piece : receives) {
                if (piece.peer != rank_) check_headers(described(piece), {piece.peer});
              }
            });
}

void Channel::reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op, int64_t divisor,
                             Clock::time_point deadline) {
  // In steps, so that the space for what comes in stays small.
  const size_t width = size_of(dtype), step = std::max<size_t>(1, 4 * kPart / width);
  if (divisor == 0) divisor = size_;
  size_t begin = 0;
  do {
    const size_t length = std::min(step, count - begin), bytes = length * width;
    uint8_t* space = scratch(received_, std::max<size_t>(1, bytes) * size_);
    std::vector<Piece> sends, receives;
    std::vector<const void*> sources(size_);
    for (int peer = 0; peer < size_; ++peer) {
      auto data = static_cast<const uint8_t*>(inputs[peer]) + begin * width;
      sources[peer] = peer == rank_ ? data : space + peer * bytes;
      if (peer == rank_) continue;
      sends.push_back({peer, const_cast<uint8_t*>(data), bytes});
      receives.push_back({peer, space + peer * bytes, bytes});
    }
    Call call;
    call.kind = Call::reduce_scatter;
    call.count = count;
    call.dtype = static_cast<uint8_t>(dtype);
    call.op = static_cast<uint8_t>(op);
    exchange(call, sends, receives, deadline);
    reduce_many(static_cast<uint8_t*>(output) + begin * width, sources.data(), size_, length, dtype, op, divisor);
    begin += length;
  } while (begin < count);
}

void Channel::allgather(const void* input, void* const* outputs, size_t bytes, Clock::time_point deadline) {
  std::vector<Piece> sends, receives;
  for (int peer = 0; peer < size_; ++peer) {
    sends.push_back({peer, const_cast<void*>(input), bytes});
    receives.push_back({peer, outputs[peer], bytes});
  }
  Call call;
  call.kind = Call::allgather;
  call.count = bytes;
  exchange(call, sends, receives, deadline);
}

void Channel::broadcast(void* data, size_t bytes, int root, Clock::time_point deadline) {
  Call call;
  call.kind = Call::broadcast;
  call.count = bytes;
  call.root = root;
  if (bytes <= kFlatBroadcast ||
      size_ == 2) {  // a tree: ranks relative to the root, the lowest set bit tells the parent
    const int relative = (rank_ - root + size_) % size_;
    int bit = 1;
    while (bit < size_ && !(relative & bit)) bit <<= 1;
    std::vector<Piece> sends, receives;
    if (relative) receives.push_back({(relative - bit + root) % size_, data, bytes});
    for (bit >>= 1; bit > 0; bit >>= 1) {
      if (relative + bit < size_) sends.push_back({(relative + bit + root) % size_, data, bytes});
    }
    const auto number = number_;
    if (!receives.empty()) exchange(call, {}, receives, deadline);
    number_ = number;  // both halves are one call
    exchange(call, sends, {}, deadline);
    return;
  }
  // Long: the root deals out parts, then everybody passes his on.
  auto base = static_cast<uint8_t*>(data);
  auto part = [&](int owner) {
    size_t begin = bytes / size_ * owner, end = owner + 1 == size_ ? bytes : bytes / size_ * (owner + 1);
    return Piece{owner, base + begin, end - begin};
  };
  std::vector<Piece> sends, receives;
  if (rank_ == root) {
    for (int peer : others()) sends.push_back(part(peer));
  } else {
    auto own = part(rank_);
    receives.push_back({root, own.data, own.bytes});
  }
  exchange(call, sends, receives, deadline);
  sends.clear();
  receives.clear();
  for (int peer : others()) {
    auto own = part(rank_);
    if (peer != root) sends.push_back({peer, own.data, own.bytes});
    if (rank_ != root) receives.push_back(part(peer));
  }
  exchange(call, sends, receives, deadline);
}

void Channel::barrier(Clock::time_point deadline) {
  Call call = numbered(Call());
  for (int distance = 1; distance < size_; distance *= 2) {
    const int to = (rank_ + distance) % size_, from = (rank_ - distance + size_) % size_;
    Requests requests;
    receive_header(requests, from);
    send_header(requests, to, call);
    wait(requests, deadline);
    check_headers(call, {from});
  }
}

void Channel::alltoall(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                       Clock::time_point deadline) {
  Call call;
  call.kind = Call::alltoall;
  exchange(call, sends, receives, deadline);
}

void Channel::gather(const void* input, void* const* outputs, size_t bytes, int root, Clock::time_point deadline) {
  Call call;
  call.kind = Call::gather;
  call.count = bytes;
  call.root = root;
  std::vector<Piece> receives;
  if (rank_ == root) {
    for (int peer = 0; peer < size_; ++peer) receives.push_back({peer, outputs[peer], bytes});
  }
  exchange(call, {{root, const_cast<void*>(input), bytes}}, receives, deadline);
}

void Channel::scatter(const void* const* inputs, void* output, size_t bytes, int root, Clock::time_point deadline) {
  Call call;
  call.kind = Call::scatter;
  call.count = bytes;
  call.root = root;
  std::vector<Piece> sends;
  if (rank_ == root) {
    for (int peer = 0; peer < size_; ++peer) sends.push_back({peer, const_cast<void*>(inputs[peer]), bytes});
  }
  exchange(call, sends, {{root, output, bytes}}, deadline);
}

}  // namespace dtrain
