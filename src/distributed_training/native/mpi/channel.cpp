#include "channel.h"

#include <algorithm>
#include <cstring>

namespace dtrain {

namespace {

// Up to here, over all peers, everybody sends everything to everybody: one message time instead of two.
constexpr size_t kFlat = 512 * 1024;
// Messages up to here carry their header with them.
constexpr size_t kFlatMessage = 16 * 1024;
// Room for a header and a flat message: whichever of the two a peer sends, it fits, and its header tells what was
// called.
constexpr size_t kSlot = sizeof(Call) + kFlatMessage;
// Broadcasts up to here go down a tree.
constexpr size_t kFlatBroadcast = 64 * 1024;
// Bytes that one rank owns of a round: enough to fill a network for longer than the reduction of the round before
// takes.
constexpr size_t kPart = 1024 * 1024;

/// Libraries send messages up to some 64 KB at once and ask first for longer ones: a little more than that goes in
/// parts.
size_t cut_of(size_t bytes) { return bytes <= 192 * 1024 ? 32 * 1024 : kMessage; }

std::string with_commas(uint64_t number) {
  std::string text = std::to_string(number);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}

}  // namespace

bool Call::operator==(const Call& other) const {
  return number == other.number && count == other.count && kind == other.kind && dtype == other.dtype &&
         op == other.op && wire == other.wire && root == other.root;
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
  if (root >= 0) text += " from or to group rank " + std::to_string(root);
  return kind == barrier ? text : text + " of " + with_commas(count) + " bytes";
}

void Requests::send(MPI_Comm comm, int peer, int tag, const void* data, size_t bytes, size_t cut) {
  auto at = static_cast<const uint8_t*>(data);
  do {
    size_t now = std::min(bytes, cut);
    peers_.push_back(peer);
    requests_.push_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Isend(at, static_cast<int>(now), MPI_BYTE, peer, tag, comm, &requests_.back()), "MPI_Isend");
    at += now;
    bytes -= now;
  } while (bytes > 0);
}

void Requests::receive(MPI_Comm comm, int peer, int tag, void* data, size_t bytes, size_t cut) {
  auto at = static_cast<uint8_t*>(data);
  do {
    size_t now = std::min(bytes, cut);
    peers_.push_back(peer);
    requests_.push_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Irecv(at, static_cast<int>(now), MPI_BYTE, peer, tag, comm, &requests_.back()), "MPI_Irecv");
    at += now;
    bytes -= now;
  } while (bytes > 0);
}

bool Requests::test() {
  if (requests_.empty()) return true;
  int done = 0;
  statuses_.resize(requests_.size());
  int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const auto& status : statuses_) {
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) {
        throw MpiError(status.MPI_ERROR, "a message from or to group rank " + std::to_string(status.MPI_SOURCE));
      }
    }
  }
  check_mpi(code, "MPI_Testall");
  if (!done) return false;
  last_ = statuses_.back();
  requests_.clear();
  peers_.clear();
  return true;
}

std::vector<int> Requests::open() const {
  std::vector<int> open;
  for (size_t i = 0; i < requests_.size(); ++i) {
    int done = 1;
    if (requests_[i] != MPI_REQUEST_NULL) MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE);
    if (!done && std::find(open.begin(), open.end(), peers_[i]) == open.end()) open.push_back(peers_[i]);
  }
  std::sort(open.begin(), open.end());
  return open;
}

Channel::Channel(MPI_Comm comm, std::vector<int> names, std::function<void()> poll)
    : comm_(comm), names_(std::move(names)), poll_(std::move(poll)) {
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

void Channel::post_headers(Requests& requests, const Call& call, const std::vector<int>& to,
                           const std::vector<int>& from, int tag) {
  for (int peer : from) {
    std::memset(slots_.data() + kSlot * peer, 0, sizeof(Call));
    requests.receive(comm_, peer, tag, slots_.data() + kSlot * peer, kSlot);
  }
  for (int peer : to) {
    headers_out_[peer] = call;
    requests.send(comm_, peer, tag, &headers_out_[peer], sizeof(Call));
  }
}

void Channel::check_headers(const Call& call, const std::vector<int>& from) const {
  for (int peer : from) {
    Call theirs;
    std::memcpy(&theirs, slots_.data() + kSlot * peer, sizeof(Call));
    if (theirs.number == 0 || theirs == call) continue;
    throw Differs("rank " + name(peer) + " called " + theirs.text() + ", this rank (" + name(rank_) + ") called " +
                  call.text() + "; all ranks must make the same calls in the same order");
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
    post_headers(requests, call, {}, {piece.peer}, tag());
    if (piece.bytes) requests.receive(comm_, piece.peer, tag() + 1, piece.data, piece.bytes, cut_of(piece.bytes));
  }
  for (const auto& piece : sends) {
    if (piece.peer == rank_) continue;
    post_headers(requests, described(piece), {piece.peer}, {}, tag());
    if (piece.bytes) requests.send(comm_, piece.peer, tag() + 1, piece.data, piece.bytes, cut_of(piece.bytes));
  }
  auto check = [&] {
    for (const auto& piece : receives) {
      if (piece.peer != rank_) check_headers(described(piece), {piece.peer});
    }
  };
  for (const auto& mine : sends) {
    if (mine.peer != rank_) continue;
    for (const auto& own : receives) {
      if (own.peer == rank_ && own.data != mine.data) std::memcpy(own.data, mine.data, std::min(mine.bytes, own.bytes));
    }
  }
  try {
    wait(requests, deadline);
  } catch (const MpiError&) {
    check();  // a message that does not fit: better to say what was called than that it was too long
    throw;
  } catch (const Late&) {
    check();
    throw;
  }
  check();
}

// ---------------------------------------------------------------------------------------------------------------------
// All-reduce.

void Channel::allreduce_flat(void* data, size_t count, Dtype dtype, Op op, int64_t divisor,
                             Clock::time_point deadline) {
  Call call;
  call.kind = Call::allreduce;
  call.count = count;
  call.dtype = static_cast<uint8_t>(dtype);
  call.op = static_cast<uint8_t>(op);
  const size_t bytes = count * size_of(dtype);
  const auto peers = others();
  std::vector<const void*> sources(size_);
  if (bytes <= kFlatMessage) {
    call = numbered(call);
    uint8_t* mine = scratch(flat_, kSlot);
    std::memcpy(mine, &call, sizeof(Call));
    std::memcpy(mine + sizeof(Call), data, bytes);
    Requests requests;
    for (int peer : peers) requests.receive(comm_, peer, tag(), slots_.data() + kSlot * peer, kSlot);
    for (int peer : peers) requests.send(comm_, peer, tag(), mine, sizeof(Call) + bytes);
    wait(requests, deadline);
    check_headers(call, peers);
    for (int i = 0; i < size_; ++i) sources[i] = (i == rank_ ? mine : slots_.data() + kSlot * i) + sizeof(Call);
  } else {
    uint8_t* space = scratch(received_, bytes * size_);
    std::vector<Piece> sends, receives;
    for (int peer : peers) {
      sends.push_back({peer, data, bytes});
      receives.push_back({peer, space + bytes * peer, bytes});
    }
    exchange(call, sends, receives, deadline);
    for (int i = 0; i < size_; ++i) sources[i] = i == rank_ ? data : space + bytes * i;
  }
  reduce_many(data, sources.data(), size_, count, dtype, op, divisor);
}

/// How the rounds see a message: cut into elements, each rank owner of a part of every round.
struct Channel::Parts {
  size_t count = 0;
  size_t round = 0;    // elements of a round, all parts together
  size_t grain = 1;    // parts begin at multiples of it
  size_t largest = 0;  // bytes that a part takes on the wire at most
  // What to send of [begin, end) to its owner; may use `space`.
  std::function<const void*(size_t begin, size_t end, uint8_t* space)> outgoing;
  std::function<size_t(size_t elements)> bytes;
  // Reduces [begin, end) from the pieces of all ranks (own one: nullptr), and gives what to send to everybody.
  std::function<const void*(size_t begin, size_t end, const uint8_t* const* pieces, uint8_t* space)> reduce;
  // Where the result [begin, end) of another owner is to be received, and what to do with it then.
  std::function<void*(size_t begin, size_t end, uint8_t* space)> incoming;
  std::function<void(size_t begin, size_t end, const uint8_t* received)> accept;

  size_t rounds() const { return (count + round - 1) / round; }
  /// Where the part of `owner` begins in a round; owner == ranks: where the round ends.
  size_t bound(size_t number, int owner, int ranks) const {
    size_t begin = number * round, length = std::min(round, count - begin);
    if (owner == ranks) return begin + length;
    return begin + length * static_cast<size_t>(owner) / static_cast<size_t>(ranks) / grain * grain;
  }
};

void Channel::rounds(Parts& parts, const Call& call, Clock::time_point deadline) {
  const size_t total = parts.rounds(), step = parts.largest * size_;
  // Two rounds are under way at a time, each with its own space.
  uint8_t* received = scratch(received_, 2 * step);
  uint8_t* encoded = scratch(encoded_, 2 * step);
  uint8_t* reply = scratch(reply_, 2 * step);
  const auto peers = others();
  const int gather_tag = tag() + 1, reply_tag = tag() + 2;
  Requests gathers[2], replies[2], headers;
  post_headers(headers, call, peers, peers, tag());
  auto span = [&](size_t round, int owner, auto&& body) {
    size_t begin = parts.bound(round, owner, size_), end = parts.bound(round, owner + 1, size_);
    if (begin < end) body(begin, end);
  };
  auto post_gather = [&](size_t round) {
    auto& requests = gathers[round % 2];
    uint8_t* into = received + (round % 2) * step;
    uint8_t* from = encoded + (round % 2) * step;
    span(round, rank_, [&](size_t begin, size_t end) {
      for (int peer : peers) {
        requests.receive(comm_, peer, gather_tag, into + peer * parts.largest, parts.bytes(end - begin));
      }
    });
    for (int peer : peers) {
      span(round, peer, [&](size_t begin, size_t end) {
        const void* data = parts.outgoing(begin, end, from + peer * parts.largest);
        requests.send(comm_, peer, gather_tag, data, parts.bytes(end - begin));
      });
    }
  };
  auto accept = [&](size_t round) {
    wait(replies[round % 2], deadline);
    for (int peer : peers) {
      span(round, peer, [&](size_t begin, size_t end) {
        parts.accept(begin, end, reply + (round % 2) * step + peer * parts.largest);
      });
    }
  };
  try {
    post_gather(0);
    for (size_t round = 0; round < total; ++round) {
      if (round + 1 < total) post_gather(round + 1);
      if (round == 0) {
        wait(headers, deadline);
        check_headers(call, peers);
      }
      wait(gathers[round % 2], deadline);
      if (round > 0) accept(round - 1);
      auto& requests = replies[round % 2];
      uint8_t* space = reply + (round % 2) * step;
      for (int peer : peers) {
        span(round, peer, [&](size_t begin, size_t end) {
          void* into = parts.incoming(begin, end, space + peer * parts.largest);
          requests.receive(comm_, peer, reply_tag, into, parts.bytes(end - begin));
        });
      }
      span(round, rank_, [&](size_t begin, size_t end) {
        std::vector<const uint8_t*> pieces(size_, nullptr);
        for (int peer : peers) pieces[peer] = received + (round % 2) * step + peer * parts.largest;
        const void* sum = parts.reduce(begin, end, pieces.data(), space + rank_ * parts.largest);
        for (int peer : peers) requests.send(comm_, peer, reply_tag, sum, parts.bytes(end - begin));
      });
    }
    accept(total - 1);
  } catch (const MpiError&) {
    check_headers(call, peers);
    throw;
  } catch (const Late&) {
    check_headers(call, peers);
    throw;
  }
}

void Channel::allreduce(void* data, size_t count, Dtype dtype, Op op, int64_t divisor, Clock::time_point deadline) {
  const size_t width = size_of(dtype);
  if (divisor == 0) divisor = size_;
  if (count * width * (size_ - 1) <= kFlat) {
    return allreduce_flat(data, count, dtype, op, divisor, deadline);
  }
  auto base = static_cast<uint8_t*>(data);
  const int rank = rank_, ranks = size_;
  Parts parts;
  parts.count = count;
  parts.round = kPart / width * size_;
  parts.largest = kPart + width;
  parts.bytes = [=](size_t elements) { return elements * width; };
  parts.outgoing = [=](size_t begin, size_t, uint8_t*) { return base + begin * width; };
  parts.incoming = [=](size_t begin, size_t, uint8_t*) { return base + begin * width; };
  parts.accept = [](size_t, size_t, const uint8_t*) {};
  parts.reduce = [=](size_t begin, size_t end, const uint8_t* const* pieces, uint8_t*) {
    uint8_t* own = base + begin * width;
    std::vector<const void*> sources(pieces, pieces + ranks);
    sources[rank] = own;
    reduce_many(own, sources.data(), ranks, end - begin, dtype, op, divisor);
    return own;
  };
  Call call;
  call.kind = Call::allreduce;
  call.count = count;
  call.dtype = static_cast<uint8_t>(dtype);
  call.op = static_cast<uint8_t>(op);
  rounds(parts, numbered(call), deadline);
}

void Channel::allreduce_compressed(float* data, size_t count, Wire wire, int64_t divisor, Clock::time_point deadline) {
  if (count == 0) return;
  const size_t part = kPart / sizeof(float);
  std::vector<float> sum(part + kInt8Block);
  Parts parts;
  parts.count = count;
  parts.round = part * size_;
  parts.grain = kInt8Block;
  parts.largest = encoded_size(wire, part + kInt8Block);
  parts.bytes = [=](size_t elements) { return encoded_size(wire, elements); };
  parts.outgoing = [=](size_t begin, size_t end, uint8_t* space) {
    encode(wire, data + begin, end - begin, space);
    return space;
  };
  parts.incoming = [](size_t, size_t, uint8_t* space) { return space; };
  parts.accept = [=](size_t begin, size_t end, const uint8_t* received) {
    decode(wire, received, end - begin, data + begin);
  };
  parts.reduce = [&](size_t begin, size_t end, const uint8_t* const* pieces, uint8_t* space) {
    const size_t length = end - begin;
    std::fill_n(sum.begin(), length, 0.0f);
    for (int i = 0; i < size_; ++i) {
      if (i == rank_) {
        reduce_into(sum.data(), data + begin, length, Dtype::f32, Op::sum);
      } else {
        decode_add(wire, pieces[i], length, sum.data());
      }
    }
    if (divisor > 1) divide(sum.data(), length, Dtype::f32, divisor);
    encode(wire, sum.data(), length, space);
    decode(wire, space, length, data + begin);  // the owner too takes what the others get
    return space;
  };
  Call call;
  call.kind = Call::allreduce;
  call.count = count;
  call.wire = static_cast<uint8_t>(wire);
  rounds(parts, numbered(call), deadline);
}

// ---------------------------------------------------------------------------------------------------------------------
// The others.

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
    std::vector<int> to = {(rank_ + distance) % size_}, from = {(rank_ - distance + size_) % size_};
    Requests requests;
    post_headers(requests, call, to, from, tag());
    wait(requests, deadline);
    check_headers(call, from);
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
