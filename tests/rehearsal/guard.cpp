// What torch's C++ core asks of a device before it lets a tensor live there: a guard that says which
// device is current, and hooks that say that there is one. Everything answers at once and does
// nothing. The part below #else is compiled once for each kind of device, with KIND its name; which
// of them a process has, REHEARSAL_GUARD_KIND says when the library is loaded.
#ifndef KIND
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <memory>

namespace pretended {
c10::DeviceIndex count() {
  const char* text = std::getenv("REHEARSAL_COUNT");
  return static_cast<c10::DeviceIndex>(text ? std::atoi(text) : 1);
}
bool chosen(const char* kind) {
  const char* text = std::getenv("REHEARSAL_GUARD_KIND");
  return text && std::strcmp(text, kind) == 0;
}
thread_local c10::DeviceIndex current = 0;
c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const c10::DeviceIndex before = current;
  if (index >= 0) current = index;
  return before;
}
}  // namespace pretended

// Python's torch.cuda.set_device changes the same current device.
extern "C" int rehearsal_current() { return pretended::current; }
extern "C" int rehearsal_exchange(int index) {
  return pretended::exchange(static_cast<c10::DeviceIndex>(index));
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
#define PRETENDED JOIN(Pretended, KIND)
#define HOOKS JOIN(KIND, Hooks)  // the registry's key is this name: CUDAHooks, XPUHooks, MPSHooks
#define HAS JOIN(has, KIND)

#define IS_CUDA 1
#define KIND CUDA
#include "guard.cpp"
#undef IS_CUDA
#undef KIND
#define KIND XPU
#include "guard.cpp"
#undef KIND
#define IS_MPS 1
#define KIND MPS
#include "guard.cpp"

#else
namespace c10::impl {
struct PRETENDED final : NoOpDeviceGuardImpl<DeviceType::KIND> {
  static Device at(DeviceIndex index) { return Device(DeviceType::KIND, index); }
  static Stream stream(Device device) {
    return Stream(Stream::DEFAULT, device.has_index() ? device : at(pretended::current));
  }
  Device exchangeDevice(Device device) const override { return at(pretended::exchange(device.index())); }
  Device getDevice() const override { return at(pretended::current); }
  void setDevice(Device device) const override { pretended::exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { pretended::exchange(device.index()); }
  Stream getStream(Device device) const noexcept override { return stream(device); }
  Stream getDefaultStream(Device device) const override { return stream(device); }
  Stream getNewStream(Device device, int) const override { return stream(device); }
  Stream exchangeStream(Stream given) const noexcept override { return stream(given.device()); }
  DeviceIndex deviceCount() const noexcept override { return pretended::count(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
const bool JOIN(guarded, KIND) =
    pretended::chosen(TEXT(KIND)) && (DeviceGuardImplRegistrar(DeviceType::KIND, new PRETENDED), true);
}  // namespace c10::impl

namespace at::rehearsal {
struct HOOKS final : JOIN(at::KIND, HooksInterface) {
#if IS_MPS
  void deviceSynchronize() const override {}
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
#else
  DeviceIndex current_device() const override { return pretended::current; }
  void deviceSynchronize(DeviceIndex) const override {}
#endif
#if IS_CUDA
  int getNumGPUs() const override { return pretended::count(); }
#elif !IS_MPS
  DeviceIndex getNumGPUs() const override { return pretended::count(); }
#endif
  bool HAS() const override { return true; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  DeviceIndex deviceCount() const override { return pretended::count(); }
  void setCurrentDevice(DeviceIndex index) const override { pretended::exchange(index); }
  DeviceIndex getCurrentDevice() const override { return pretended::current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return pretended::exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return pretended::exchange(index); }
};

const bool JOIN(hooked, KIND) =
    pretended::chosen(TEXT(KIND)) &&
    (JOIN(KIND, HooksRegistry)()->Register(TEXT(HOOKS), [](auto...) { return std::make_unique<HOOKS>(); }), true);
}  // namespace at::rehearsal
#endif
