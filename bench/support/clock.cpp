// SPDX-License-Identifier: MIT
#include "support/clock.hpp"

#include <cstdlib>
#include <dlfcn.h>
#include <fstream>
#include <string>

namespace bellows::bench {

namespace {

std::optional<double> processor_mhz() {
    std::ifstream file("/proc/cpuinfo");
    double sum = 0;
    int processors = 0;
    for (std::string line; std::getline(file, line);) {
        const std::size_t colon = line.find(':');
        if (line.rfind("cpu MHz", 0) != 0 || colon == std::string::npos)
            continue;
        sum += std::strtod(line.c_str() + colon + 1, nullptr);
        ++processors;
    }
    return processors > 0 && sum > 0 ? std::optional(sum / processors) : std::nullopt;
}

/// NVML, loaded when first asked for and kept: loading takes longer than a clock stays up.
class ManagementLibrary {
public:
    ManagementLibrary() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
        const auto begin = reinterpret_cast<int (*)()>(find("nvmlInit_v2"));
        find_device_ = reinterpret_cast<FindDevice>(find("nvmlDeviceGetHandleByUUID"));
        read_clock_ = reinterpret_cast<ReadClock>(find("nvmlDeviceGetClockInfo"));
        ready_ =
            begin != nullptr && find_device_ != nullptr && read_clock_ != nullptr && begin() == 0;
    }
    ~ManagementLibrary() {
        const auto end = reinterpret_cast<int (*)()>(find("nvmlShutdown"));
        if (ready_ && end != nullptr)
            end();
        if (library_ != nullptr)
            dlclose(library_);
    }
    ManagementLibrary(const ManagementLibrary&) = delete;
    ManagementLibrary& operator=(const ManagementLibrary&) = delete;

    std::optional<double> processor_mhz(const std::string& uuid) const {
        void* device = nullptr;
        unsigned mhz = 0;
        constexpr int kProcessors = 1; // NVML_CLOCK_SM
        if (!ready_ || find_device_(uuid.c_str(), &device) != 0 ||
            read_clock_(device, kProcessors, &mhz) != 0)
            return std::nullopt;
        return mhz;
    }

private:
    using FindDevice = int (*)(const char*, void**);
    using ReadClock = int (*)(void*, int, unsigned*);

    void* find(const char* name) const {
        return library_ == nullptr ? nullptr : dlsym(library_, name);
    }

    void* library_;
    FindDevice find_device_ = nullptr;
    ReadClock read_clock_ = nullptr;
    bool ready_ = false;
};

} // namespace

std::optional<double> clock_mhz(const DeviceInfo& info) {
    if (info.is_cpu)
        return processor_mhz();
    static const ManagementLibrary library;
    std::string uuid = "GPU-" + info.uuid; // as the library writes it: 8-4-4-4-12 digits
    for (const std::size_t dash : {12, 17, 22, 27})
        if (dash < uuid.size())
            uuid.insert(dash, "-");
    return library.processor_mhz(uuid);
}

} // namespace bellows::bench
