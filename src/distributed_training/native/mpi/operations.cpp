// The collectives of MpiBackend: what torch's arguments mean in terms of a Group.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "backend.h"

namespace dtrain {

namespace {

// Device tensors are reduced in pieces of this size, so that copies and reductions overlap.
constexpr size_t kDevicePiece = 4 * 1024 * 1024;

/// A tensor's elements as the kernels see them: a complex number is two reals.
struct Numbers {
  Dtype dtype;
  size_t per_element = 1;
};

Numbers numbers_of(const at::Tensor& tensor, Op op) {
  const auto type = tensor.scalar_type();
  if (c10::isComplexType(type)) {
    TORCH_CHECK(op == Op::sum || op == Op::average, "complex tensors can be summed and averaged, not reduced by ",
                name_of(op));
    TORCH_CHECK(type != at::kComplexHalf, "complex32 tensors cannot be reduced");
    return {type == at::kComplexDouble ? Dtype::f64 : Dtype::f32, 2};
  }
  switch (type) {
    case at::kFloat: return {Dtype::f32};
    case at::kDouble: return {Dtype::f64};
    case at::kHalf: return {Dtype::f16};
    case at::kBFloat16: return {Dtype::bf16};
    case at::kChar: return {Dtype::i8};
    case at::kByte: return {Dtype::u8};
    case at::kShort: return {Dtype::i16};
    case at::kInt: return {Dtype::i32};
    case at::kLong: return {Dtype::i64};
    case at::kBool: return {Dtype::boolean};
    default: TORCH_CHECK_TYPE(false, "tensors of type ", type, " can be sent but not reduced");
  }
}

Op op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM: return Op::sum;
    case c10d::ReduceOp::AVG: return Op::average;
    case c10d::ReduceOp::PRODUCT: return Op::product;
    case c10d::ReduceOp::MIN: return Op::minimum;
    case c10d::ReduceOp::MAX: return Op::maximum;
    case c10d::ReduceOp::BAND: return Op::band;
    case c10d::ReduceOp::BOR: return Op::bor;
    case c10d::ReduceOp::BXOR: return Op::bxor;
    default: TORCH_CHECK(false, "this reduction is not known");
  }
}

/// What a "multiply, then sum" multiplies by; nothing for all other reductions.
std::optional<at::Tensor> factor_of(const c10d::ReduceOp& op, const at::Tensor& like) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return std::nullopt;
  // Its name up to torch 2.11; later versions keep it as another name for the same.
  auto premul = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(premul, "a pre-multiplied sum without its factor");
  if (premul->tensor_factor.defined()) return premul->tensor_factor.to(like.options());
  return at::scalar_tensor(premul->double_factor, like.options());
}

void check_supported(const at::Tensor& tensor, Op op) {
  TORCH_CHECK(supports(numbers_of(tensor, op).dtype, op), "tensors of type ", tensor.scalar_type(),
              " cannot be reduced by ", name_of(op));
}

void check_one(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, what, " takes one tensor for each process, not ", tensors.size());
}

void check_list(const std::vector<std::vector<at::Tensor>>& lists, int size, const at::Tensor& like, const char* what) {
  TORCH_CHECK(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size), what, " needs a list of ", size,
              " tensors, one for each rank");
  for (const auto& tensor : lists[0]) {
    TORCH_CHECK(tensor.numel() == like.numel() && tensor.scalar_type() == like.scalar_type(), what,
                " needs tensors of one size and type, not ", tensor.sizes(), " ", tensor.scalar_type(), " and ",
                like.sizes(), " ", like.scalar_type());
  }
}

std::vector<void*> cut(void* base, int parts, size_t bytes) {
  std::vector<void*> pointers;
  for (int i = 0; i < parts; ++i) pointers.push_back(static_cast<uint8_t*>(base) + bytes * i);
  return pointers;
}

}  // namespace

MpiBackend::WorkPtr MpiBackend::allreduce_all(c10d::OpType type, const Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  const Op op = op_of(options.reduceOp);
  for (const auto& tensor : tensors) {
    check_supported(tensor, op);
    if (auto factor = factor_of(options.reduceOp, tensor)) {
      at::NoGradGuard no_grad;
      tensor.mul_(*factor);
    }
  }
  return submit({type, "all_reduce", tensors, {}, options.timeout, !options.asyncOp}, [tensors, op](Running& run) {
    for (const auto& tensor : tensors) {
      const auto numbers = numbers_of(tensor, op);
      if (!tensor.device().is_cpu()) {
        run.stage.in_pieces(tensor, kDevicePiece, [&](void* data, size_t count) {
          run.group.allreduce(data, count * numbers.per_element, numbers.dtype, op, run.timeout);
        });
        continue;
      }
      void* data = run.both(tensor);
      run.group.allreduce(data, tensor.numel() * numbers.per_element, numbers.dtype, op, run.timeout);
    }
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_one(tensors, "all_reduce");
  return allreduce_all(c10d::OpType::ALLREDUCE, tensors, options);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce_all(c10d::OpType::ALLREDUCE_COALESCED, tensors, options);
}

MpiBackend::WorkPtr MpiBackend::allreduce_compressed(const at::Tensor& tensor, Wire wire, bool average) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "a compressed all_reduce takes float32, not ",
                   tensor.scalar_type());
  return submit({c10d::OpType::ALLREDUCE, "all_reduce", {tensor}, {}, c10d::kUnsetTimeout}, [=](Running& run) {
    if (!tensor.device().is_cpu()) {
      return run.stage.in_pieces(tensor, kDevicePiece, [&](void* data, size_t count) {
        run.group.allreduce_compressed(static_cast<float*>(data), count, wire, average, run.timeout);
      });
    }
    auto data = static_cast<float*>(run.both(tensor));
    run.group.allreduce_compressed(data, tensor.numel(), wire, average, run.timeout);
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "broadcast: rank ", options.rootRank,
              " is not in a group of ", size_);
  const int root = static_cast<int>(options.rootRank), rank = rank_;
  auto tensor = tensors[0];
  return submit({c10d::OpType::BROADCAST, "broadcast", tensors, {}, options.timeout, !options.asyncOp},
                [=](Running& run) {
                  const auto use = rank == root ? Stage::Use::read : Stage::Use::write;
                  void* data = run.stage.place(tensor, use, !run.group.shared_memory() && mpi_is_cuda_aware());
                  run.stage.fetch();
                  run.group.broadcast(data, tensor.nbytes(), root, run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_one(tensors, "reduce");
  const Op op = op_of(options.reduceOp);
  auto tensor = tensors[0];
  check_supported(tensor, op);
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "reduce: rank ", options.rootRank,
              " is not in a group of ", size_);
  auto factor = factor_of(options.reduceOp, tensor);
  at::NoGradGuard no_grad;
  // Only the root's tensor changes: the others reduce a copy.
  const bool root = rank_ == options.rootRank;
  at::Tensor target = root ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
  if (factor) target.mul_(*factor);
  return submit({c10d::OpType::REDUCE, "reduce", {tensor}, {target}, options.timeout, !options.asyncOp},
                [=](Running& run) {
                  const auto numbers = numbers_of(target, op);
                  void* data = run.both(target);
                  run.stage.fetch();
                  run.group.allreduce(data, target.numel() * numbers.per_element, numbers.dtype, op, run.timeout);
                  run.stage.give_back();
                });
}

// ---------------------------------------------------------------------------------------------------------------------
// Gathering.

MpiBackend::WorkPtr MpiBackend::allgather_all(c10d::OpType type, std::vector<std::pair<at::Tensor, at::Tensor>> pairs,
                                              const c10d::AllgatherOptions& options) {
  Tensors outputs, inputs;
  for (const auto& [output, input] : pairs) {
    TORCH_CHECK(output.numel() == input.numel() * size_ && output.scalar_type() == input.scalar_type(),
                "all_gather of ", input.sizes(), " ", input.scalar_type(), " over ", size_, " ranks does not fit in ",
                output.sizes(), " ", output.scalar_type());
    outputs.push_back(output);
    inputs.push_back(input);
  }
  const int size = size_;
  return submit({type, "all_gather", outputs, inputs, options.timeout, !options.asyncOp}, [=](Running& run) {
    std::vector<std::pair<void*, void*>> places;
    for (const auto& [output, input] : pairs) places.emplace_back(run.write(output), run.read(input));
    run.stage.fetch();
    for (size_t i = 0; i < pairs.size(); ++i) {
      const size_t bytes = pairs[i].second.nbytes();
      auto parts = cut(places[i].first, size, bytes);
      run.group.allgather(places[i].second, parts.data(), bytes, run.timeout);
    }
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  return allgather_all(c10d::OpType::_ALLGATHER_BASE, {{output, input}}, options);
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "all_gather of ", inputs.size(), " tensors into ", outputs.size());
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < outputs.size(); ++i) pairs.emplace_back(outputs[i], inputs[i]);
  return allgather_all(c10d::OpType::COALESCED, std::move(pairs), options);
}

MpiBackend::WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  auto input = inputs[0];
  check_list(outputs, size_, input, "all_gather");
  auto list = outputs[0];
  return submit({c10d::OpType::ALLGATHER, "all_gather", list, inputs, options.timeout, !options.asyncOp},
                [=](Running& run) {
                  void* from = run.read(input);
                  std::vector<void*> to;
                  for (const auto& tensor : list) to.push_back(run.write(tensor));
                  run.stage.fetch();
                  run.group.allgather(from, to.data(), input.nbytes(), run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "all_gather needs a list of outputs for each of ", size_,
              " ranks");
  Tensors all;
  for (const auto& list : outputs) {
    TORCH_CHECK(list.size() == inputs.size(), "all_gather of ", inputs.size(), " tensors into ", list.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK(list[i].nbytes() == inputs[i].nbytes(), "all_gather: an output has not the size of its input");
      all.push_back(list[i]);
    }
  }
  return submit({c10d::OpType::ALLGATHER_COALESCED, "all_gather", all, inputs, options.timeout, !options.asyncOp},
                [outputs = outputs, inputs = inputs](Running& run) {
                  std::vector<void*> from;
                  std::vector<std::vector<void*>> to(inputs.size());
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    from.push_back(run.read(inputs[i]));
                    for (const auto& list : outputs) to[i].push_back(run.write(list[i]));
                  }
                  run.stage.fetch();
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    run.group.allgather(from[i], to[i].data(), inputs[i].nbytes(), run.timeout);
                  }
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  check_one(inputs, "gather");
  auto input = inputs[0];
  const int root = static_cast<int>(options.rootRank);
  Tensors list;
  if (rank_ == root) {
    check_list(outputs, size_, input, "gather");
    list = outputs[0];
  }
  return submit({c10d::OpType::GATHER, "gather", list, inputs, options.timeout}, [=](Running& run) {
    void* from = run.read(input);
    std::vector<void*> to;
    for (const auto& tensor : list) to.push_back(run.write(tensor));
    run.stage.fetch();
    run.group.gather(from, to.data(), input.nbytes(), root, run.timeout);
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  check_one(outputs, "scatter");
  auto output = outputs[0];
  const int root = static_cast<int>(options.rootRank);
  Tensors list;
  if (rank_ == root) {
    check_list(inputs, size_, output, "scatter");
    list = inputs[0];
  }
  return submit({c10d::OpType::SCATTER, "scatter", outputs, list, options.timeout}, [=](Running& run) {
    void* to = run.write(output);
    std::vector<const void*> from;
    for (const auto& tensor : list) from.push_back(run.read(tensor));
    run.stage.fetch();
    run.group.scatter(from.data(), to, output.nbytes(), root, run.timeout);
    run.stage.give_back();
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Reduce and scatter.

MpiBackend::WorkPtr MpiBackend::reduce_scatter_all(c10d::OpType type,
                                                   std::vector<std::pair<at::Tensor, at::Tensor>> pairs,
                                                   const c10d::ReduceScatterOptions& options) {
  const Op op = op_of(options.reduceOp);
  Tensors outputs, inputs;
  for (auto& [output, input] : pairs) {
    TORCH_CHECK(input.numel() == output.numel() * size_ && output.scalar_type() == input.scalar_type(),
                "reduce_scatter of ", input.sizes(), " ", input.scalar_type(), " over ", size_,
                " ranks does not fit in ", output.sizes(), " ", output.scalar_type());
    check_supported(input, op);
    if (auto factor = factor_of(options.reduceOp, input)) {
      at::NoGradGuard no_grad;
      input = input.mul(*factor);
    }
    outputs.push_back(output);
    inputs.push_back(input);
  }
  const int size = size_;
  return submit({type, "reduce_scatter", outputs, inputs, options.timeout, !options.asyncOp}, [=](Running& run) {
    std::vector<std::pair<void*, void*>> places;
    for (const auto& [output, input] : pairs) places.emplace_back(run.write(output), run.read(input));
    run.stage.fetch();
    for (size_t i = 0; i < pairs.size(); ++i) {
      const auto& output = pairs[i].first;
      const auto numbers = numbers_of(output, op);
      auto parts = cut(places[i].second, size, output.nbytes());
      run.group.reduce_scatter(parts.data(), places[i].first, output.numel() * numbers.per_element, numbers.dtype, op,
                               run.timeout);
    }
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_all(c10d::OpType::_REDUCE_SCATTER_BASE, {{output, input}}, options);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter of ", inputs.size(), " tensors into ", outputs.size());
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < outputs.size(); ++i) pairs.emplace_back(outputs[i], inputs[i]);
  return reduce_scatter_all(c10d::OpType::_REDUCE_SCATTER_BASE, std::move(pairs), options);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  check_one(outputs, "reduce_scatter");
  auto output = outputs[0];
  check_list(inputs, size_, output, "reduce_scatter");
  const Op op = op_of(options.reduceOp);
  check_supported(output, op);
  auto list = inputs[0];
  if (auto factor = factor_of(options.reduceOp, output)) {
    at::NoGradGuard no_grad;
    for (auto& tensor : list) tensor = tensor.mul(*factor);
  }
  return submit({c10d::OpType::REDUCE_SCATTER, "reduce_scatter", outputs, list, options.timeout, !options.asyncOp},
                [=](Running& run) {
                  std::vector<const void*> from;
                  for (const auto& tensor : list) from.push_back(run.read(tensor));
                  void* to = run.write(output);
                  run.stage.fetch();
                  const auto numbers = numbers_of(output, op);
                  run.group.reduce_scatter(from.data(), to, output.numel() * numbers.per_element, numbers.dtype, op,
                                           run.timeout);
                  run.stage.give_back();
                });
}

// ---------------------------------------------------------------------------------------------------------------------
// All to all, barrier.

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "all_to_all between ", input.scalar_type(), " and ",
              output.scalar_type());
  auto sizes = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* side) {
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    const size_t row = rows > 0 ? tensor.nbytes() / rows : 0;
    std::vector<size_t> bytes(size_);
    if (splits.empty()) {
      TORCH_CHECK(rows % size_ == 0, "all_to_all: the ", rows, " rows of the ", side, " cannot be dealt to ", size_,
                  " ranks; give the sizes");
      std::fill(bytes.begin(), bytes.end(), row * (rows / size_));
      return bytes;
    }
    TORCH_CHECK(splits.size() == static_cast<size_t>(size_) &&
                    std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                "all_to_all: the ", side, " sizes ", splits, " do not add up to its ", rows, " rows over ", size_,
                " ranks");
    for (int i = 0; i < size_; ++i) bytes[i] = row * splits[i];
    return bytes;
  };
  auto out = sizes(output, output_splits, "output"), in = sizes(input, input_splits, "input");
  return submit({c10d::OpType::ALLTOALL_BASE, "all_to_all", {output}, {input}, options.timeout},
                [output = output, input = input, out, in](Running& run) {
                  auto to = static_cast<uint8_t*>(run.write(output)), from = static_cast<uint8_t*>(run.read(input));
                  run.stage.fetch();
                  std::vector<Channel::Piece> sends, receives;
                  for (size_t i = 0; i < out.size(); ++i) {
                    sends.push_back({static_cast<int>(i), from, in[i]});
                    receives.push_back({static_cast<int>(i), to, out[i]});
                    from += in[i];
                    to += out[i];
                  }
                  run.group.alltoall(sends, receives, run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
              "all_to_all needs lists of ", size_, " tensors, one for each rank");
  return submit({c10d::OpType::ALLTOALL, "all_to_all", outputs, inputs, options.timeout},
                [outputs = outputs, inputs = inputs](Running& run) {
                  std::vector<Channel::Piece> sends, receives;
                  for (size_t i = 0; i < outputs.size(); ++i) {
                    sends.push_back({static_cast<int>(i), run.read(inputs[i]), inputs[i].nbytes()});
                    receives.push_back({static_cast<int>(i), run.write(outputs[i]), outputs[i].nbytes()});
                  }
                  run.stage.fetch();
                  run.group.alltoall(sends, receives, run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  return submit({c10d::OpType::BARRIER, "barrier", {}, {}, options.timeout, !options.asyncOp},
                [](Running& run) { run.group.barrier(run.timeout); });
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) { barrier(options)->wait(); }

}  // namespace dtrain
