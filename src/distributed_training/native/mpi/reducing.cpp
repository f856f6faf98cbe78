// The collectives of MpiBackend that reduce: what torch's arguments mean in terms of a Group.
#include <ATen/ATen.h>

#include "arguments.h"
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

}  // namespace dtrain
