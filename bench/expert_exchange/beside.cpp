// SPDX-License-Identifier: MIT
#include "expert_exchange/beside.hpp"

#include "grouped_gemm/product.hpp"
#include "support/peaks.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <functional>

namespace bellows::bench {

namespace {

const char* const kName = "products";

class Products {
public:
    Products(Device& device, const GroupedShape& shape)
        : device_(device), product_(device, case_of(shape)),
          recording_(device, QueueRole::Compute, kName) {
        const Workload workload = product_.workload();
        workload.record(recording_);
        device_.take_trace();
        submit().wait(kTimeLimit);
        device_.wait_idle(kTimeLimit);
        operations_ = take_operations().size();
        if (const std::string wrong = workload.verify(); !wrong.empty())
            throw Error(ErrorCode::Internal,
                        "wrong result: products beside the exchange: " + wrong);
    }

    TimePoint submit() { return device_.submit(recording_); }

    /// Of each run since the last call, from its first dispatch to its last: the median.
    double seconds() {
        const std::vector<TraceEvent> events = take_operations();
        std::vector<double> times;
        for (std::size_t first = 0; first + operations_ <= events.size(); first += operations_)
            times.push_back(1e-9 * static_cast<double>(events[first + operations_ - 1].end_ns -
                                                       events[first].begin_ns));
        if (times.empty())
            throw Error(ErrorCode::Unsupported, "--beside: the device has no timestamps");
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }

private:
    static GroupedCase case_of(const GroupedShape& shape) {
        GroupedCase made;
        made.shape = shape;
        made.b.prepacked = true;
        made.even = true;
        return made;
    }

    std::vector<TraceEvent> take_operations() {
        std::vector<TraceEvent> events = device_.take_trace();
        std::erase_if(events, [](const TraceEvent& event) { return event.category != kName; });
        std::sort(events.begin(), events.end(),
                  [](const TraceEvent& a, const TraceEvent& b) { return a.begin_ns < b.begin_ns; });
        return events;
    }

    Device& device_;
    GroupedProduct product_;
    Recording recording_;
    std::size_t operations_ = 0;
};

} // namespace

std::vector<BesideResult> time_beside(ExchangeRig& rig, Stopwatch& watch,
                                      const ExchangeOptions& options, const TimingOptions& timing) {
    const std::vector<std::uint64_t>& sizes = *options.beside;
    Products products(rig.device(), {sizes[0], sizes[1], sizes[2], sizes[3]});
    const auto time = [&](const char* name, const std::function<void()>& once) {
        raise_clock(rig.device());
        BesideResult result;
        result.name = name;
        result.seconds = watch
                             .time(once, timing,
                                   [&] {
                                       rig.wait_idle();
                                       rig.device().take_trace();
                                   })
                             .seconds.median;
        rig.wait_idle();
        auto slowest = static_cast<std::int64_t>(1e9 * products.seconds());
        watch.host().all_reduce_max(std::span(&slowest, 1));
        result.products = 1e-9 * static_cast<double>(slowest);
        return result;
    };
    const auto submit = [&] { return products.submit(); };
    std::vector<BesideResult> results = {time("", [&] { products.submit().wait(kTimeLimit); }),
                                         time("dispatch", [&] { rig.dispatch_around(submit); }),
                                         time("combine", [&] { rig.combine_around(submit); })};
    if (options.trace)
        rig.write_trace(watch.world(), *options.trace, [&] {
            products.submit().wait(kTimeLimit);
            rig.dispatch_around(submit);
            rig.combine_around(submit);
        });
    return results;
}

} // namespace bellows::bench
