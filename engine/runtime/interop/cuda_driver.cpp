// SPDX-License-Identifier: MIT
#include "cuda_driver.hpp"

#include <bellows/base/error.hpp>

#include <dlfcn.h>

namespace bellows::cuda {

namespace {

/// Never closed: the driver has threads of its own.
void* library() {
    static void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return handle;
}

} // namespace

std::shared_ptr<const Driver> Driver::open(std::string& why_not) {
    if (library() == nullptr) {
        why_not = "there is no libcuda.so.1";
        return nullptr;
    }
    auto driver = std::make_shared<Driver>();
    const auto find = [&](auto& function, const char* name) {
        function =
            reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library(), name));
        if (function == nullptr && why_not.empty())
            why_not = std::string("libcuda.so.1 has no ") + name;
    };
    why_not.clear();
    find(driver->init, "cuInit");
    find(driver->error_string, "cuGetErrorString");
    find(driver->device_count, "cuDeviceGetCount");
    find(driver->device, "cuDeviceGet");
    find(driver->device_uuid, "cuDeviceGetUuid_v2");
    find(driver->can_access_peer, "cuDeviceCanAccessPeer");
    find(driver->retain_context, "cuDevicePrimaryCtxRetain");
    find(driver->release_context, "cuDevicePrimaryCtxRelease_v2");
    find(driver->push_context, "cuCtxPushCurrent_v2");
    find(driver->pop_context, "cuCtxPopCurrent_v2");
    find(driver->granularity, "cuMemGetAllocationGranularity");
    find(driver->create, "cuMemCreate");
    find(driver->release, "cuMemRelease");
    find(driver->export_handle, "cuMemExportToShareableHandle");
    find(driver->import_handle, "cuMemImportFromShareableHandle");
    find(driver->reserve, "cuMemAddressReserve");
    find(driver->free_reserved, "cuMemAddressFree");
    find(driver->map, "cuMemMap");
    find(driver->unmap, "cuMemUnmap");
    find(driver->set_access, "cuMemSetAccess");
    find(driver->create_stream, "cuStreamCreate");
    find(driver->destroy_stream, "cuStreamDestroy_v2");
    find(driver->copy, "cuMemcpyDtoDAsync_v2");
    find(driver->create_event, "cuEventCreate");
    find(driver->destroy_event, "cuEventDestroy_v2");
    find(driver->record_event, "cuEventRecord");
    find(driver->query_event, "cuEventQuery");
    if (why_not.empty() && driver->init(0) != kSuccess)
        why_not = "cuInit fails";
    return why_not.empty() ? driver : nullptr;
}

void Driver::check(Result result, const char* doing) const {
    if (result == kSuccess)
        return;
    const char* text = nullptr;
    if (error_string(result, &text) != kSuccess || text == nullptr)
        text = "an unknown error";
    throw Error(ErrorCode::Unsupported,
                std::string(doing) + " through libcuda.so.1: " + text + " (" +
                    std::to_string(result) + ")",
                -1, result);
}

} // namespace bellows::cuda
