// A "cuda" device for the CPU build of torch: its memory is the host's, and its kernels are those of the CPU.
//
// Everything above the kernels is torch itself: dispatch, autograd with its streams, factories, copies, pinned memory.
// What a GPU could only do by waiting, or not at all, is told to a listener with the name of the operator:
//   read:    a number leaves the device (`item`, a copy to the host), a size depends on numbers there (`nonzero`), or
//            somebody asks to wait (`synchronize`)
//   upload:  a copy from memory of the host that is not pinned, or without non_blocking
//   mixed:   indices of the host for a tensor of the device, which are copied
// Other operators refuse tensors of both, apart from scalars of the host, which travel with the launch.
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::IValue;
using at::Tensor;

const at::Device gpu(at::kCUDA, 0);
const c10::DispatchKeySet gpu_key(c10::DispatchKey::CUDA);

thread_local c10::StreamId stream = 0;
std::atomic<c10::StreamId> streams{0};

void (*listener)(const char* kind, const char* op, long long stream) = nullptr;

void tell(const char* kind, const std::string& op) {
  if (listener) listener(kind, op.c_str(), stream);
}

// Memory

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = n ? std::malloc(n) : nullptr;
    return {data, data, std::free, gpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return std::free; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(at::kCUDA, &device_memory);

std::mutex pinned_mutex;
std::set<const void*> pinned;

struct PinnedMemory final : c10::Allocator {
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t n) override {
    void* data = std::malloc(n ? n : 1);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, release, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
PinnedMemory pinned_memory;

bool is_pinned(const Tensor& tensor) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned.count(tensor.storage().data()) > 0;
}

// One device; streams have numbers, but all work is done at once, so that there is nothing to wait for

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream numbered(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, gpu, id); }
  c10::DeviceType type() const override { return at::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Device getDevice() const override { return gpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return numbered(stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return numbered(++streams); }
  c10::Stream getNewStream(c10::Device, int) const override { return numbered(++streams); }
  c10::Stream exchangeStream(c10::Stream next) const override { return numbered(std::exchange(stream, next.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { tell("read", "synchronize"); }
  void synchronizeEvent(void*) const override { tell("read", "synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { tell("read", "synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
};

// Kernels: the CPU's, on a tensor of the CPU over the same memory

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);  // a kernel may resize it
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options, at::kCPU);
}

Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), &device_memory, /*resizable=*/true);
  std::memcpy(storage->mutable_data(), tensor.storage().data(), tensor.storage().nbytes());
  auto result = at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), gpu_key, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

void resize_strided(const Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides);
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.element_size(), impl->storage_offset());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  auto larger = device_memory.allocate(bytes);
  if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(larger));
  storage->set_nbytes(bytes);
}

bool has_mask(const std::vector<IValue>& given) {  // x[mask] finds the places of the mask first
  for (const IValue& value : given) {
    if (!value.isList()) continue;
    for (const IValue& each : value.toListRef()) {
      if (!each.isTensor() || !each.toTensor().defined()) continue;
      const auto type = each.toTensor().scalar_type();
      if (type == at::kBool || type == at::kByte) return true;
    }
  }
  return false;
}

// Operators whose CUDA kernels wait for numbers of the device
const std::set<std::string> waiting = {
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
    "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::histc",
};

// Operators that take indices, also of the host, from where they are copied
const std::set<std::string> indexing = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
};

bool waits(const std::string& name, const std::vector<IValue>& given) {
  if (name == "aten::repeat_interleave") return given.back().isNone();  // output_size
  return waiting.count(name) || (indexing.count(name) && has_mask(given));
}

struct Arguments {
  bool mixed = false;
  void look(const Tensor& tensor) {
    if (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) mixed = true;
  }
  IValue host(const IValue& value) {
    if (value.isTensor()) {
      look(value.toTensor());
      return on_host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) look(each), list.push_back(on_host(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
        if (each) look(*each);
        list.push_back(each ? std::optional<Tensor>(on_host(*each)) : each);
      }
      return list;
    }
    if (value.isDevice()) return at::Device(at::kCPU);
    return value;
  }
};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, at::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  const std::vector<IValue> given(stack->begin() + begin, stack->end());
  const std::string& name = schema.name();
  if (waits(name, given)) tell("read", name);

  Arguments seen;
  for (size_t i = begin; i < stack->size(); ++i) (*stack)[i] = seen.host((*stack)[i]);
  TORCH_CHECK(!seen.mixed || indexing.count(name), name,
              ": Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!");
  if (seen.mixed) tell("mixed", name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    IValue& result = (*stack)[first + i];
    if (const auto* alias = returns[i].alias_info()) {
      TORCH_CHECK(alias->isWrite(), name, " makes a view: the emulated device needs a kernel of its own for it");
      for (size_t j = 0; j < arguments.size(); ++j)
        if (arguments[j].alias_info() && *arguments[j].alias_info() == *alias) {
          const Tensor written = given[j].toTensor(), made = result.toTensor();
          if (written.sizes() != made.sizes()) {  // an empty `out` that the kernel has resized
            resize_strided(written, made.sizes(), made.strides());
            on_host(written).copy_(made);
          }
          result = given[j];
        }
    } else if (result.isTensor()) {
      result = on_device(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : result.toTensorVector()) list.push_back(on_device(each));
      result = list;
    }
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, gpu_key, type, format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory, gpu_key, type);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() && source.is_cpu() && !(non_blocking && is_pinned(source))) tell("upload", "aten::copy_");
  if (self.is_cpu() && source.is_cuda() && !(non_blocking && is_pinned(self))) tell("read", "aten::copy_");
  on_host(self).copy_(on_host(source));
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  tell("read", "aten::_local_scalar_dense");
  return at::_local_scalar_dense(on_host(self));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  resize_strided(self, sizes, c10::contiguous_strides(sizes));
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize);
  m.impl("is_set_to", at::native::is_set_to);
  // These have kernels for both devices, and a composite one that would otherwise be used here
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return at::kCUDA; }
}  // namespace accelerator
}  // namespace at

// torch.UntypedStorage.resize_, which the CPU build of torch refuses for this device
extern "C" void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto memory = device_memory.allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept) std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

extern "C" void set_listener(void (*function)(const char*, const char*, long long)) { listener = function; }
