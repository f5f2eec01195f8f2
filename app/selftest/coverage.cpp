// SPDX-License-Identifier: MIT
// What the self-test leaves out, by what the device and the build have.
#include "app/selftest/suite.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/fp8/gemm.hpp>

namespace bellows::selftest {

std::vector<std::string> not_covered(const Device& device) {
    std::vector<std::string> list;
    const GemmClass& own = gemm_class(device);
    for (const GemmClass& c : gemm_classes(device))
        if (c.name != own.name)
            list.push_back("bf16 products of the class " + c.name + ": " +
                           (c.why_not.empty() ? "this device uses " + own.name +
                                                    "; BELLOWS_GEMM_CLASS=" + c.name +
                                                    " makes the self-test run it"
                                              : c.why_not));
    for (const fp8::Variant variant : fp8::kVariants)
        if (const std::string why_not = fp8::why_not(device, variant); !why_not.empty())
            list.push_back(std::string("FP8 products of the variant ") + fp8::to_string(variant) +
                           ": " + why_not);
    list.emplace_back(
        "FP8 recipes beside E4M3 with power-of-two scales and those of rows, which each "
        "take a shader: the tests (ops_table_test) check all");
    list.emplace_back("exchange across nodes, over a device link and in low latency, and more than "
                      "two ranks: mpirun -n N bellows selftest checks N ranks, "
                      "bench_expert_exchange checks the other modes");
    list.emplace_back("matrices of the sizes of real models: the benchmarks check theirs before "
                      "they time them");
    return list;
}

} // namespace bellows::selftest
