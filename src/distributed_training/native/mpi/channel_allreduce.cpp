// The all-reduce of a channel: a short message goes to everybody at once, a long one in rounds in which every rank owns
// a part.
#include <algorithm>
#include <cstring>

#include "channel.h"

namespace dtrain {

namespace {

/// Up to how many bytes everybody sends everything to everybody: one message time instead of two. Two ranks send no more
/// bytes this way than the other; more than two send more, which only pays while it is little.
size_t flat_up_to(int ranks) {
  return ranks == 2 ? size_t{2} * 1024 * 1024 : size_t{512} * 1024 / static_cast<size_t>(ranks - 1);
}

Call reduction(size_t count, Dtype dtype, Op op) {
  Call call;
  call.kind = Call::allreduce;
  call.count = count;
  call.dtype = static_cast<uint8_t>(dtype);
  call.op = static_cast<uint8_t>(op);
  return call;
}

}  // namespace

void Channel::allreduce_flat(void* data, size_t count, Dtype dtype, Op op, int64_t divisor,
                             Clock::time_point deadline) {
  const Call call = numbered(reduction(count, dtype, op));
  const size_t width = size_of(dtype), bytes = count * width, head = std::min(bytes, kHead);
  const size_t pieces = (bytes - head + kPiece - 1) / kPiece;  // after the head, which travels with the header
  const auto peers = others();
  auto base = static_cast<uint8_t*>(data);
  uint8_t* own = scratch(flat_, kSlot);
  const Header header = calls_.header(call);
  std::memcpy(own, &header, sizeof(Header));
  std::memcpy(own + sizeof(Header), data, head);
  uint8_t* space = scratch(received_, (bytes - head) * size_);
  std::vector<const void*> sources(size_);
  std::vector<Requests> requests(1 + pieces);
  for (int peer : peers) receive_header(requests[0], peer);
  for (int peer : peers) requests[0].send(comm_, peer, tag(), own, sizeof(Header) + head);
  for (size_t i = 0; i < pieces; ++i) {
    const size_t begin = head + i * kPiece, length = std::min(kPiece, bytes - begin);
    for (int peer : peers) {
      requests[1 + i].receive(comm_, peer, tag() + 1, space + (bytes - head) * peer + begin - head, length);
    }
    for (int peer : peers) requests[1 + i].send(comm_, peer, tag() + 1, base + begin, length);
  }
  auto all = [&] {
    wait(requests[0], deadline);
    check_headers(call, peers);
    for (int i = 0; i < size_; ++i) sources[i] = (i == rank_ ? own : slot(i)) + sizeof(Header);
    reduce_many(base, sources.data(), size_, head / width, dtype, op, divisor);
    for (size_t i = 0; i < pieces; ++i) {
      const size_t begin = head + i * kPiece, length = std::min(kPiece, bytes - begin);
      wait(requests[1 + i], deadline);
      for (int peer : peers) sources[peer] = space + (bytes - head) * peer + begin - head;
      sources[rank_] = base + begin;
      reduce_many(base + begin, sources.data(), size_, length / width, dtype, op, divisor);
    }
  };
  explained(all, [&] { check_headers(call, peers); });
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
  for (int peer : peers) receive_header(headers, peer);
  for (int peer : peers) send_header(headers, peer, call);
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
  auto all = [&] {
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
  };
  explained(all, [&] { check_headers(call, peers); });
}

void Channel::allreduce(void* data, size_t count, Dtype dtype, Op op, int64_t divisor, Clock::time_point deadline) {
  const size_t width = size_of(dtype);
  if (divisor == 0) divisor = size_;
  if (count * width <= flat_up_to(size_)) return allreduce_flat(data, count, dtype, op, divisor, deadline);
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
  rounds(parts, numbered(reduction(count, dtype, op)), deadline);
}

void Channel::allreduce_compressed(float* data, size_t count, Wire wire, int64_t divisor, Clock::time_point deadline) {
  if (count == 0) return;
  const size_t part = kPart / sizeof(float);
  std::vector<float> sum(std::min(part, count) + kInt8Block);
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
  Call call = reduction(count, Dtype::f32, Op::sum);
  call.wire = static_cast<uint8_t>(wire);
  rounds(parts, numbered(call), deadline);
}

}  // namespace dtrain
