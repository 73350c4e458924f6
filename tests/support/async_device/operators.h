// Operators of the simulated device. Each becomes a task that calls torch's CPU kernel on the same memory.
//
// The shapes of results come from the operator's meta kernel. Where values decide (`nonzero`, `equal`), or a generator is
// used, whose numbers must not depend on the order of tasks, the host waits and computes at once.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"

namespace async_device {

using at::Tensor;

inline bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

inline Range range_of(const Tensor& tensor, bool is_write) {
  if (!tensor.numel()) return {nullptr, nullptr, is_write};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto* low = static_cast<char*>(tensor.unsafeGetTensorImpl()->mutable_data());
  return {low, low + (last + 1) * tensor.element_size(), is_write};
}

// The same memory as a tensor of the CPU. It does not keep the memory alive, as a kernel does not.
inline Tensor on_cpu(const Tensor& tensor) {
  TORCH_CHECK(!tensor.numel() || tensor.storage().data(), "an operator is given memory that was freed");
  void* data = tensor.numel() ? tensor.unsafeGetTensorImpl()->mutable_data() : nullptr;
  auto alias = at::from_blob(data, tensor.sizes(), tensor.strides(), at::dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

inline Tensor empty_like_strided(const Tensor& tensor) {
  return at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.scalar_type());
}

// The tensors in an argument or result.
inline std::vector<Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<Tensor> found;
  if (value.isOptionalTensorList())
    for (std::optional<Tensor> tensor : value.toOptionalTensorVector()) found.push_back(tensor.value_or(Tensor()));
  return found;
}

template <class Change>
c10::IValue with_tensors(const c10::IValue& value, c10::DeviceType type, Change change) {
  auto changed = [&](const Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return changed(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(changed(tensor));
    return c10::IValue(std::move(list));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) return c10::Device(type);
  return value;
}

// An operator's call: its arguments, and which of them a result is.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue> args;
  std::vector<int> alias_of;  // of a result: the argument that it is; -1 for a new tensor
  std::vector<Range> ranges;
  bool uses_generator = false;
  bool has_tensors_only = true;  // as results

  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack) : op(op) {
    const auto& arguments = op.schema().arguments();
    const auto& returns = op.schema().returns();
    args.assign(stack.end() - arguments.size(), stack.end());
    for (size_t i = 0; i < arguments.size(); ++i) {
      for (auto& tensor : tensors_in(args[i]))
        if (is_ours(tensor)) ranges.push_back(range_of(tensor, is_written(i)));
      uses_generator |= arguments[i].name() == "generator";
    }
    for (auto& result : returns) {
      int alias = -1;
      if (result.alias_info()) {
        TORCH_CHECK(result.alias_info()->isWrite(), "the device lacks the view operator ", op.schema().name());
        for (size_t i = 0; i < arguments.size(); ++i)
          if (is_written(i) && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets()) alias = i;
      }
      alias_of.push_back(alias);
      const auto kind = result.type()->kind();
      has_tensors_only &= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    }
  }

  bool is_written(size_t argument) const {
    auto* alias = op.schema().arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  // The arguments for the CPU's kernel. Tensors of the host are copied if the kernel runs later.
  torch::jit::Stack host_args(bool is_later) const {
    torch::jit::Stack copies;
    for (auto& arg : args)
      copies.push_back(with_tensors(arg, c10::kCPU, [&](const Tensor& tensor) {
        if (is_ours(tensor)) return on_cpu(tensor);
        if (!is_later) return tensor;
        auto copy = tensor.clone();
        copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
        return copy;
      }));
    return copies;
  }

  // Results of the meta kernel; false if there is none, or values decide.
  bool infer(torch::jit::Stack& results) const {
    if (uses_generator || !has_tensors_only) return false;
    torch::jit::Stack metas;
    for (auto& arg : args)
      metas.push_back(with_tensors(arg, c10::kMeta, [](const Tensor& tensor) {
        if (!is_ours(tensor)) return tensor;
        return at::empty_strided(tensor.sizes(), tensor.strides(), at::dtype(tensor.dtype()).device(at::kMeta));
      }));
    results = metas;
    try {
      op.callBoxed(&results);
    } catch (const std::exception&) {
      return false;
    }
    if (op.schema().name() == "aten::native_layer_norm")  // the CPU's statistics have the dtype of the parameters
      for (int r : {1, 2})
        results[r] = results[r].toTensor().to((args[2].isTensor() ? args[2] : args[0]).toTensor().scalar_type());
    for (size_t i = 0; i < args.size(); ++i) {  // ``out=`` of another shape
      if (!is_written(i)) continue;
      auto tensors = tensors_in(args[i]), shapes = tensors_in(metas[i]);
      for (size_t k = 0; k < tensors.size(); ++k)
        if (is_ours(tensors[k]) && tensors[k].sizes() != shapes[k].sizes()) tensors[k].resize_(shapes[k].sizes());
    }
    return true;
  }
};

inline void compute_at_once(const Call& call, torch::jit::Stack* stack) {
  auto& d = device();
  const auto name = call.op.schema().name();
  {
    Lock lock;
    ++d.counts["sync " + name];
    launch(current_stream, name, call.ranges, [] { return true; });  // its place in the order of accesses
  }
  synchronize_stream(current_stream);
  auto results = call.host_args(false);
  call.op.callBoxed(&results);
  torch::jit::drop(*stack, call.args.size());
  for (size_t r = 0; r < results.size(); ++r)
    stack->push_back(call.alias_of[r] >= 0 ? call.args[call.alias_of[r]]
                                           : with_tensors(results[r], kDevice, [](const Tensor& tensor) {
                                               if (is_ours(tensor)) return tensor;
                                               auto moved = empty_like_strided(tensor);
                                               synchronize_stream(current_stream);  // it is cleared first
                                               on_cpu(moved).copy_(tensor);
                                               return moved;
                                             }));
}

inline void call_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call(op, *stack);
  torch::jit::Stack shapes;
  if (!call.infer(shapes)) return compute_at_once(call, stack);
  Lock lock;
  std::vector<c10::IValue> results;
  std::vector<std::vector<Tensor>> made;
  auto ranges = call.ranges;
  for (size_t r = 0; r < shapes.size(); ++r) {
    made.emplace_back();
    if (call.alias_of[r] >= 0) {
      results.push_back(call.args[call.alias_of[r]]);
      continue;
    }
    results.push_back(with_tensors(shapes[r], kDevice, [&](const Tensor& shape) {
      auto result = empty_like_strided(shape);
      ranges.push_back(range_of(result, true));
      made.back().push_back(on_cpu(result));
      return result;
    }));
  }
  launch(current_stream, op.schema().name(), ranges, [op, args = call.host_args(true), made]() mutable {
    auto computed = std::move(args);
    op.callBoxed(&computed);
    for (size_t r = 0; r < made.size(); ++r) {
      size_t next = 0;
      if (made[r].empty()) continue;
      for (auto& tensor : tensors_in(computed[r]))
        if (tensor.defined()) made[r][next++].copy_(tensor);
    }
    return true;
  });
  torch::jit::drop(*stack, call.args.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

inline Tensor copy_from(const Tensor& from, const Tensor& into, bool non_blocking) {
  if (!from.numel()) return into;
  const int stream = current_stream;
  const bool is_read_later = is_ours(from) || (non_blocking && is_pinned(from.const_data_ptr()));
  const bool is_written_later = is_ours(into) || (non_blocking && is_pinned(into.const_data_ptr()));
  // Pageable memory is read before the call returns.
  Tensor source = is_ours(from) ? on_cpu(from) : is_read_later ? from : from.clone();
  Tensor target = is_ours(into) ? on_cpu(into) : into;
  {
    Lock lock;
    std::vector<Range> ranges{range_of(into, true)};
    if (is_read_later) ranges.push_back(range_of(from, false));
    const char* name = !is_ours(from) ? "copy to device" : is_ours(into) ? "copy" : "copy to host";
    launch(stream, name, ranges, [source, target]() mutable {
      target.copy_(source);
      return true;
    });
  }
  if (!is_written_later || (!non_blocking && !is_ours(from))) {
    ++device().counts["sync copy"];
    synchronize_stream(stream);
  }
  return into;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& into) {
  if (into.sizes() != from.sizes()) into.resize_(from.sizes());
  return copy_from(from, into, false);
}

inline at::Scalar local_scalar(const Tensor& tensor) {
  {
    Lock lock;
    ++device().counts["sync item"];
    launch(current_stream, "item", {range_of(tensor, false)}, [] { return true; });
  }
  synchronize_stream(current_stream);
  return on_cpu(tensor).item();
}

inline Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "the storage cannot be resized");
  if (!num_bytes) {
    impl->set_data_ptr_noswap(c10::DataPtr(nullptr, impl->device()));
  } else {
    auto data = device_allocator().allocate(num_bytes);
    if (impl->data()) device_allocator().copy_data(data.get(), impl->data(), std::min(impl->nbytes(), num_bytes));
    impl->set_data_ptr_noswap(std::move(data));
  }
  impl->set_nbytes(num_bytes);
}

inline const Tensor& resize(const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  const size_t num_bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < num_bytes) resize_storage(self.storage(), num_bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                                std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(self, size, stride, offset);
  });
  library.impl("_reshape_alias", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("view", [](const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("unfold", at::native::unfold);
  library.impl("record_stream", [](Tensor& self, at::Stream user) {
    share(self.storage().data(), static_cast<int>(user.id()));
  });
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::native::set_(self, source);
  });
  library.impl("set_.source_Storage_storage_offset",
               [](Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride)
                   -> Tensor& { return at::cpu::set_(self, source, offset, size, stride); });
  // torch would compute these of other operators, which it has no need for on the CPU.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "_foreach_copy_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_operator>());
}

}  // namespace async_device
