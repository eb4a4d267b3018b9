// Lets a CPU build of PyTorch take tensors that say they are on "cuda" and have no memory (FakeTensor).
// It answers the two questions that are asked on the way, which device and which stream; nothing is computed.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

struct OneCudaDevice final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, OneCudaDevice)

}  // namespace c10::impl

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // this very name is looked up
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(0); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
