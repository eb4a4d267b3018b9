// Lets PyTorch take tensors that say they are on "cuda" and have no memory (FakeTensor), without a GPU.
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
  bool hasCuDNN() const override { return false; }
  // Attention asks for them, of a build for CUDA
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(0); }
};
// Before a build for CUDA registers its own, which then step back
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at

// After it has registered its own, as the last one counts here
extern "C" void register_guard() {
  using namespace c10;
  static const impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new impl::OneCudaDevice());
}
