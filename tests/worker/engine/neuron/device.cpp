// The device `neuron` of the tests: torch's PrivateUse1 with its memory on the host.
//
// One boxed kernel serves every operator. It lends the CPU's kernel tensors over the same bytes, so nothing is copied,
// a view stays a view, and every number has the CPU's bits. It records what arrives, and refuses what it is told to.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::IValue, c10::Storage, c10::Stream;
using SkipAutograd = at::AutoDispatchBelowADInplaceOrView;

constexpr DeviceType kNeuron = DeviceType::PrivateUse1;

// State. Backward passes run in a thread of their own, so what is not atomic has a lock.

struct State {
  std::mutex lock;
  std::map<std::string, int64_t> calls;  // "aten::mm Float[2d] Float[2d]" -> how often
  std::set<std::string> missing;         // operators without a kernel, named without their overload
  std::atomic<int> devices{4};
  std::atomic<bool> touched{false};  // the device was chosen, or has memory
  std::atomic<bool> float64{true}, generators{true}, flash{true}, strided_writes{true};
  std::atomic<int64_t> allocated{0}, peak{0};  // bytes
} state;

thread_local DeviceIndex chosen = 0;

void record(const std::string& call) {
  std::lock_guard<std::mutex> held(state.lock);
  state.calls[call]++;
}

Device device_at(DeviceIndex index) { return {kNeuron, index < 0 ? chosen : index}; }

// Memory: a storage of the device owns a storage of the CPU, and counts.

struct Block {
  Storage bytes;
  int64_t size;
  Block(Storage from, int64_t n) : bytes(std::move(from)), size(n) {
    const int64_t now = state.allocated += size;
    for (int64_t peak = state.peak; now > peak && !state.peak.compare_exchange_weak(peak, now);) {
    }
  }
  ~Block() { state.allocated -= size; }
};

c10::DataPtr own(const Storage& cpu, Device device) {
  auto* block = new Block(cpu, static_cast<int64_t>(cpu.nbytes()));
  return {cpu.mutable_data(), block, [](void* kept) { delete static_cast<Block*>(kept); }, device};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    state.touched = true;
    return own(Storage(Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true), device_at(-1));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(kNeuron, &allocator);

Storage lend(const Storage& device) {
  auto release = [](void* kept) { delete static_cast<Storage*>(kept); };
  c10::DataPtr data{device.mutable_data(), new Storage(device), release, c10::kCPU};
  return {Storage::use_byte_size_t(), device.nbytes(), std::move(data), c10::GetCPUAllocator(), true};
}

Tensor over(const Storage& storage, const Tensor& like) {
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  auto out = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

// Random numbers: the CPU's generator under the device's name.

struct Generator final : c10::GeneratorImpl {
  at::Generator of_cpu = at::detail::createCPUGenerator();
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  c10::GeneratorImpl* cpu() const { return of_cpu.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { of_cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return of_cpu.current_seed(); }
  uint64_t seed() override { return of_cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "neuron: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "neuron: a generator has no offset"); }
  void set_state(const c10::TensorImpl& saved) override { cpu()->set_state(saved); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->of_cpu = of_cpu.clone();
    return copy;
  }
};

std::string shape_class(const Tensor& t) {
  std::string out = std::string(c10::toString(t.scalar_type())) + "[" + std::to_string(t.dim()) + "d";
  return out + (t.is_contiguous() ? "]" : " strided]");
}

// One call of an operator: device tensors go in as tensors of the CPU, and come back as tensors of the device.

class Call {
 public:
  std::string arguments;  // the shape classes of the device's tensors
  bool mixed = false;     // there are tensors of the CPU with more than one number

  IValue in(const IValue& value) {
    if (value.isStorage()) return value.toStorage().device().is_cpu() ? value : IValue(in(value.toStorage()));
    if (value.isDevice() && value.toDevice().type() == kNeuron) {
      at_ = device_at(value.toDevice().index());
      return Device(c10::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kNeuron)
      return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->of_cpu;
    return with_tensors(value, [this](const Tensor& t) { return in(t); });
  }

  IValue out(const IValue& value) {
    return with_tensors(value, [this](const Tensor& t) { return out(t); });
  }

  Tensor in(const Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() != kNeuron) {  // Python's own numbers come as such, without a dimension
      mixed = mixed || t.dim() > 0;
      return t;
    }
    check(t);
    TORCH_CHECK(!at_ || *at_ == t.device(), "neuron: tensors on ", *at_, " and on ", t.device());
    at_ = t.device();
    arguments += " " + shape_class(t);
    tensors_.emplace_back(t, over(in(t.storage()), t));
    return tensors_.back().second;
  }

  Tensor out(const Tensor& t) {
    if (!t.defined()) return t;
    check(t);
    for (const auto& [device, cpu] : tensors_)
      if (cpu.is_same(t)) return device;
    return over(out(t.storage()), t);
  }

  // Kernels may change the sizes or the memory of an argument (resize_, set_, out=).
  void settle() {
    for (auto& [device, cpu] : storages_)
      if (device.data() != cpu.data() || device.nbytes() != cpu.nbytes()) {
        device.set_data_ptr(own(cpu, device.device()));
        device.set_nbytes(cpu.nbytes());
      }
    for (auto& [device, cpu] : tensors_) {
      auto* impl = device.unsafeGetTensorImpl();
      const auto storage = out(cpu.storage());
      if (!storage.is_alias_of(device.storage())) impl->set_storage_keep_dtype(storage);
      const bool same = device.sizes() == cpu.sizes() && device.strides() == cpu.strides();
      if (!same || device.storage_offset() != cpu.storage_offset())
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

 private:
  std::optional<Device> at_;
  std::vector<std::pair<Storage, Storage>> storages_;  // of the device, of the CPU
  std::vector<std::pair<Tensor, Tensor>> tensors_;

  static void check(const Tensor& t) {
    TORCH_CHECK(state.float64 || t.scalar_type() != at::kDouble, "neuron: no float64 on this device");
  }

  Storage in(const Storage& s) {
    for (const auto& [device, cpu] : storages_)
      if (device.is_alias_of(s)) return cpu;
    storages_.emplace_back(s, lend(s));
    return storages_.back().second;
  }

  Storage out(const Storage& s) {
    for (const auto& [device, cpu] : storages_)
      if (cpu.is_alias_of(s)) return device;
    state.touched = true;
    const auto where = at_.value_or(device_at(-1));
    Storage device{Storage::use_byte_size_t(), s.nbytes(), own(s, where), &allocator, true};
    storages_.emplace_back(device, s);
    return device;
  }

  template <class Change>
  static IValue with_tensors(const IValue& value, Change change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(change(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(change(*t)) : t);
      return list;
    }
    return value;
  }
};

void refuse_strided_write(const c10::FunctionSchema& schema, size_t i, const IValue& argument) {
  const auto* alias = schema.arguments()[i].alias_info();
  if (state.strided_writes || !alias || !alias->isWrite() || !argument.isTensor()) return;
  const Tensor& t = argument.toTensor();
  TORCH_CHECK(!t.defined() || t.device().type() != kNeuron || t.is_non_overlapping_and_dense() || !t.numel(),
              "neuron: ", schema.name(), " writes into a strided slice");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  {
    std::lock_guard<std::mutex> held(state.lock);
    TORCH_CHECK_NOT_IMPLEMENTED(!state.missing.count(schema.name()), "neuron: no kernel for ", schema.name());
  }
  SkipAutograd skip;
  Call call;
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    IValue& argument = (*stack)[first + i];
    refuse_strided_write(schema, i, argument);
    argument = call.in(IValue(argument));
  }
  const std::string& name = schema.name();
  TORCH_CHECK(!call.mixed || name.find("index") != std::string::npos, "neuron: ", name,
              " has tensors of the CPU among those of the device");
  record(name + call.arguments);
  op.callBoxed(stack);
  call.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    IValue& result = (*stack)[i];
    result = call.out(IValue(result));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Copies to and from the host have no operator of the CPU.

Tensor copy(const Tensor& from, const Tensor& to, bool) {
  SkipAutograd skip;
  const char* way = from.device().is_cpu() ? "copy in" : to.device().is_cpu() ? "copy out" : "copy within";
  const bool cast = from.scalar_type() != to.scalar_type();
  record(std::string(way) + " " + shape_class(from) + (cast ? " as " : "") +
         (cast ? c10::toString(to.scalar_type()) : ""));
  TORCH_CHECK(state.strided_writes || to.device().type() != kNeuron || to.is_non_overlapping_and_dense(),
              "neuron: ", way, " into a strided slice");
  Call source, target;
  target.in(to).copy_(source.in(from));
  return to;
}

// Attention: torch's fused function for such devices, with the CPU's kernel, if the CPU would take its own fused one.

int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool gqa) {
  SkipAutograd skip;
  const auto fused = static_cast<int64_t>(at::SDPBackend::overrideable);
  if (q.key_set().has(c10::DispatchKey::Python)) return fused;  // a compiler's tensor, without numbers
  Call call;
  auto on_cpu = [&](const Tensor& t) { return call.in(t).set_requires_grad(t.requires_grad()); };
  const auto taken = at::_fused_sdp_choice(on_cpu(q), on_cpu(k), on_cpu(v), mask ? std::optional(on_cpu(*mask)) : mask,
                                           dropout, causal, scale, gqa);
  const auto plain = static_cast<int64_t>(at::SDPBackend::math);
  return taken == plain || !state.flash ? plain : fused;
}

using Attended = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Attended attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, double dropout,
                   bool causal, bool, std::optional<double> scale) {
  SkipAutograd skip;
  Call call;
  const auto mask = bias ? std::optional(call.in(*bias)) : bias;
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(call.in(q), call.in(k), call.in(v), dropout,
                                                                     causal, mask, scale);
  record("aten::_scaled_dot_product_fused_attention_overrideable" + call.arguments);
  const auto none = at::empty({0}, q.options());  // a compiler saves what is defined
  return {call.out(out), call.out(sums), none, none, q.size(2), k.size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, std::array<bool, 4>,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  SkipAutograd skip;
  Call call;
  const auto mask = bias.defined() ? std::optional(call.in(bias)) : std::nullopt;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      call.in(grad), call.in(q), call.in(k), call.in(v), call.in(out), call.in(sums), dropout, causal, mask, scale);
  record("aten::_scaled_dot_product_fused_attention_overrideable_backward" + call.arguments);
  return {call.out(dq), call.out(dk), call.out(dv), {}};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy);
  // torch computes these from smaller operators on a device without a kernel, which rounds in other places.
  for (const char* name : {"native_layer_norm", "select_backward", "silu_backward", "slice_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
}

// The rest that torch asks of a device: one stream, nothing asynchronous.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kNeuron; }
  Device getDevice() const override { return device_at(-1); }
  Device exchangeDevice(Device to) const override {
    const Device before = getDevice();
    uncheckedSetDevice(to);
    return before;
  }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() < state.devices, "neuron: no device ", to.index(), " among ", state.devices.load());
    state.touched = true;
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(Device to) const noexcept override { chosen = to.index() < 0 ? chosen : to.index(); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(state.devices); }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, device_at(d.index())); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const override { return getStream(s.device()); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = &state; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state.devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return state.touched; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(state.devices); }
  DeviceIndex getCurrentDevice() const override { return chosen; }
  void setCurrentDevice(DeviceIndex to) const override { Guard().setDevice(device_at(to)); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return Guard().exchangeDevice(device_at(to)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
  Device getDeviceFromPtr(void*) const override { return device_at(-1); }
  // FSDP2 empties and fills the storages of gathered weights.
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DataPtr resized = allocator.allocate(bytes);
    if (const size_t shared = std::min(bytes, storage.nbytes()))
      std::memcpy(resized.mutable_get(), storage.data(), shared);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(resized));
    impl->set_nbytes(bytes);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    TORCH_CHECK(state.generators, "neuron: torch.Generator is not available on this device");
    return at::make_generator<Generator>(index);
  }
} hooks;

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("calls", [] {
    std::lock_guard<std::mutex> held(state.lock);
    return state.calls;
  });
  m.def("forget", [] {
    std::lock_guard<std::mutex> held(state.lock);
    state.calls.clear();
    state.peak = state.allocated.load();
  });
  m.def("limit", [](int devices, bool float64, bool generators, bool flash, bool strided, std::set<std::string> gone) {
    state.devices = devices;
    state.float64 = float64, state.generators = generators, state.flash = flash, state.strided_writes = strided;
    std::lock_guard<std::mutex> held(state.lock);
    state.missing = gone;
  });
  m.def("touched", [] { return state.touched.load(); });
  m.def("count", [] { return state.devices.load(); });
  m.def("current", [] { return static_cast<int>(chosen); });
  m.def("choose", [](int to) { Guard().setDevice(device_at(static_cast<DeviceIndex>(to))); });
  m.def("memory", [] { return std::make_pair(state.allocated.load(), state.peak.load()); });
  m.def("on_cpu", [](const Tensor& t) { return over(lend(t.storage()), t); });
}
