// SPDX-License-Identifier: MIT
// Grouped products of fp8, bf16 and f32 operands: checks samples of the product against f64, then
// times it, and shows the rate as a share of what bounds it: matrix or FMA units, or memory.
// `--help` lists the options.

#include "grouped_gemm/product.hpp"
#include "support/peaks.hpp"
#include "support/program.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/matrix_images.hpp>

#include <algorithm>
#include <array>
#include <optional>

namespace bellows::bench {
namespace {

constexpr const char* kHelp =
    R"(bench_grouped_gemm: products of groups of rows (experts), each with a matrix of its own. GB/s counts each
byte of each operand once. "of peak" is the share of a loop of the same run on the unit that bounds the
product: matrix units ("matrix") or f32 units ("fma"), or memory ("copy"). The last column also shows the
memory that operands and workspace take.

  --shape GxMxNxK,...        G groups of M rows on average, weights N x K; "none" for none
  --even                     all groups have M rows, not 0.7 to 1.3 times as many
  --layout NAME,...          contiguous  D [rows, N] = A [rows, K] B[g], groups begin at aligned rows
                             dgrad       D [rows, K] = A [rows, N] B[g], the same weights
                             masked      as contiguous, every group in a block of its own: decoding
                             k           D[g] [N, K] += A [rows, N] B [rows, K], a weight's gradient
                             (default: all, each at DeepGEMM's shapes; less on CPUs)
  --ids TxExUxNxK,...        ggml's MUL_MAT_ID from ids to results: T tokens, each by U of E experts
                             N x K; "none" for none; without --shape and --layout nothing else is
                             timed, as these leave out the ids
  --a fp8|bf16|f32 --b ...   storage of operands (default: fp8 by fp8, and bf16 by bf16); b may be
                             prepacked: fp8 weights packed once, before the clock starts; of k on
                             native units both operands transposed before
  --scales pow2|f32          of fp8 operands (default pow2)
  --variant NAME             device (default: what suits it), decoded, packed, streamed, direct or
                             native; see fp8/gemm.hpp
  --tiles                    times every tile of --variant packed, streamed or direct, the usual one
                             first
  --tile MxNxVxWxPxKxSxA,... these tiles, of --tiles or not (fp8::Tile): M x N matrices per subgroup,
                             V x W subgroups and P along k, steps of K k through workgroup memory, which
                             holds S of them, loads A steps ahead. packed MxNxVxWxPx0x1xA, direct
                             MxNxVxWx1xKxSxA, streamed MxNx1xWxPx0x1xA or, with A through workgroup
                             memory, MxNx1xWx1x128x1xA
  --d bf16|f32               storage of results (default bf16; f32 for k and ids)
)";

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::InvalidArgument, what + "; see bench_grouped_gemm --help");
}

struct Pair {
    OperandStorage a, b;
};

struct Usual {
    GroupedLayout layout;
    GroupedShape shape;
};

constexpr auto kOnGpus = std::to_array<Usual>({
    {GroupedLayout::Contiguous, {4, 8192, 4096, 7168}},
    {GroupedLayout::Contiguous, {4, 8192, 7168, 2048}},
    {GroupedLayout::Contiguous, {8, 4096, 4096, 7168}},
    {GroupedLayout::Contiguous, {8, 4096, 7168, 2048}},
    {GroupedLayout::Dgrad, {8, 4096, 4096, 7168}},
    {GroupedLayout::Dgrad, {8, 4096, 7168, 2048}},
    {GroupedLayout::Masked, {1, 1024, 4096, 7168}},
    {GroupedLayout::Masked, {1, 1024, 7168, 2048}},
    {GroupedLayout::Masked, {2, 512, 4096, 7168}},
    {GroupedLayout::Masked, {2, 512, 7168, 2048}},
    {GroupedLayout::Masked, {4, 256, 4096, 7168}},
    {GroupedLayout::Masked, {4, 256, 7168, 2048}},
    {GroupedLayout::Masked, {32, 1, 4096, 7168}},
    {GroupedLayout::Masked, {32, 8, 4096, 7168}},
    {GroupedLayout::Masked, {32, 20, 4096, 7168}},
    {GroupedLayout::Masked, {32, 64, 4096, 7168}},
    {GroupedLayout::Masked, {32, 1, 7168, 2048}},
    {GroupedLayout::Masked, {32, 8, 7168, 2048}},
    {GroupedLayout::Masked, {32, 20, 7168, 2048}},
    {GroupedLayout::Masked, {32, 64, 7168, 2048}},
    {GroupedLayout::K, {4, 8192, 4096, 7168}},
    {GroupedLayout::K, {4, 8192, 7168, 2048}},
    {GroupedLayout::K, {8, 4096, 4096, 7168}},
    {GroupedLayout::K, {8, 4096, 7168, 2048}},
});
constexpr auto kOnCpus = std::to_array<Usual>({
    {GroupedLayout::Contiguous, {8, 128, 1024, 1024}},
    {GroupedLayout::Dgrad, {8, 64, 256, 512}},
    {GroupedLayout::Masked, {8, 4, 512, 512}},
    {GroupedLayout::K, {4, 64, 256, 256}},
});

std::vector<MulMatIdShape> usual_ids(bool cpu) {
    if (cpu)
        return {{32, 16, 4, 256, 256}};
    std::vector<MulMatIdShape> shapes;
    for (const std::uint64_t tokens : {8u, 64u, 128u, 512u}) {
        shapes.push_back({tokens, 128, 8, 768, 2048});
        shapes.push_back({tokens, 32, 4, 1792, 2048});
    }
    return shapes;
}

class BenchGroupedGemm : public Program {
    std::string help() const override { return kHelp; }

    void take(Arguments& arguments) override {
        take_storage(arguments);
        even_ = arguments.flag("--even");
        if (const auto text = arguments.value("--layout"))
            for (const std::string& word : Arguments::split(*text))
                layouts_.push_back(layout_of(word));
        if (const auto lists = arguments.sizes("--shape", "GxMxNxK")) {
            shapes_.emplace();
            for (const auto& v : *lists)
                shapes_->push_back({v[0], v[1], v[2], v[3]});
        }
        if (const auto lists = arguments.sizes("--ids", "TxExUxNxK")) {
            ids_.emplace();
            for (const auto& v : *lists)
                ids_->push_back({v[0], v[1], v[2], v[3], v[4]});
            if (!ids_->empty() && !shapes_ && layouts_.empty())
                shapes_.emplace(); // what is asked for, and no more
        } else if (shapes_ || !layouts_.empty()) {
            ids_.emplace();
        }
        for (const GroupedShape& s : shapes_.value_or(std::vector<GroupedShape>{}))
            if (s.n % 8 != 0 || s.k % 8 != 0)
                refuse("--shape " + name_of(s) + " needs N and K that are multiples of 8");
        for (const MulMatIdShape& s : ids_.value_or(std::vector<MulMatIdShape>{}))
            if (s.n % 8 != 0 || s.k % 8 != 0 || s.top_k > s.experts)
                refuse("--ids " + name_of(s) +
                       " needs N and K that are multiples of 8, and U at most E");
    }

    void add(Device& device) override {
        copy_ = measure(device, copy_peak);
        fma_ = measure(device, fma_peak);
        matrix_ = measure(device, matrix_peak);
        add_context("class of bf16 products", gemm_class(device).name);
        for (const GemmClass& c : gemm_classes(device))
            if (c.units != GemmClass::Units::None && c.why_not.empty())
                add_context(std::string("registers of ") +
                                (c.units == GemmClass::Units::F16 ? "f16" : "bf16") + " matrices",
                            matrix_slots(device, c.shape, c.units) ? "regular" : "irregular");
        const bool cpu = device.info().is_cpu;
        for (const auto& [layout, shape] : chosen(cpu))
            for (const Pair& pair : pairs_)
                add_product(device, {layout, shape, pair.a, pair.b, d_, variant_, even_});
        for (const MulMatIdShape& shape : ids_.value_or(usual_ids(cpu)))
            for (const Pair& pair : pairs_)
                add_ids(device, shape, pair);
    }

    static GroupedLayout layout_of(const std::string& word) {
        for (const GroupedLayout layout : {GroupedLayout::Contiguous, GroupedLayout::Dgrad,
                                           GroupedLayout::Masked, GroupedLayout::K})
            if (word == name_of(layout))
                return layout;
        refuse("--layout: \"" + word + "\" is no layout");
    }

    void take_storage(Arguments& arguments) {
        const std::string scales = arguments.value("--scales").value_or("pow2");
        if (scales != "pow2" && scales != "f32")
            refuse("--scales: \"" + scales + "\" is no rule");
        const auto rule = scales == "f32" ? fp8::ScaleRule::F32 : fp8::ScaleRule::PowerOfTwo;
        const auto storage = [&](const char* name, const std::string& word) {
            const auto found = storage_of(word, rule);
            if (!found)
                refuse(std::string(name) + ": \"" + word + "\" is no storage");
            return *found;
        };
        const auto a = arguments.value("--a"), b = arguments.value("--b");
        for (const char* usual : {"fp8", "bf16"}) {
            const Pair pair{storage("--a", a.value_or(usual)), storage("--b", b.value_or(usual))};
            if (pairs_.empty() || pairs_[0].a != pair.a || pairs_[0].b != pair.b)
                pairs_.push_back(pair);
        }
        const std::string d = arguments.value("--d").value_or("bf16");
        if (d != "bf16" && d != "f32")
            refuse("--d: \"" + d + "\" is no storage");
        d_ = d == "f32" ? DType::F32 : DType::BF16;
        const std::string name = arguments.value("--variant").value_or("device");
        const auto variant = fp8::variant_of(name);
        if (!variant)
            refuse("--variant: \"" + name + "\" is none");
        variant_ = *variant;
        take_tiles(arguments);
    }

    void take_tiles(Arguments& arguments) {
        all_tiles_ = arguments.flag("--tiles");
        const auto lists = arguments.sizes("--tile", "MxNxVxWxPxKxSxA", 0);
        if ((all_tiles_ || lists) &&
            (variant_ == fp8::Variant::Device || variant_ == fp8::Variant::Decoded))
            refuse("--tiles and --tile go with --variant packed, streamed or direct");
        if (all_tiles_ && lists)
            refuse("--tiles and --tile do not go together");
        for (const auto& list : lists.value_or(std::vector<std::vector<std::uint64_t>>{})) {
            std::string name;
            std::vector<std::uint32_t> v;
            for (const std::uint64_t number : list) {
                name += (name.empty() ? "" : "x") + std::to_string(number);
                v.push_back(static_cast<std::uint32_t>(std::min<std::uint64_t>(number, ~0u)));
            }
            tiles_.push_back({{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]}, name});
        }
    }

    /// The usual shapes of the layouts, or the given shapes in each.
    std::vector<Usual> chosen(bool cpu) const {
        std::vector<Usual> result;
        const std::vector<Usual> usual = cpu ? std::vector<Usual>(kOnCpus.begin(), kOnCpus.end())
                                             : std::vector<Usual>(kOnGpus.begin(), kOnGpus.end());
        const auto wanted = [&](GroupedLayout layout) {
            return layouts_.empty() ||
                   std::find(layouts_.begin(), layouts_.end(), layout) != layouts_.end();
        };
        if (!shapes_) {
            std::copy_if(usual.begin(), usual.end(), std::back_inserter(result),
                         [&](const Usual& u) { return wanted(u.layout); });
            return result;
        }
        for (const GroupedShape& shape : *shapes_)
            for (const GroupedLayout layout : {GroupedLayout::Contiguous, GroupedLayout::Dgrad,
                                               GroupedLayout::Masked, GroupedLayout::K})
                if (wanted(layout))
                    result.push_back({layout, shape});
        return result;
    }

    void add_product(Device& device, const GroupedCase& c) {
        const std::string name = std::string(name_of(c.layout)) + "/" + name_of(c.shape) + "/" +
                                 name_of(c.a) + "x" + name_of(c.b) + (c.even ? "/even" : "");
        add_ways(name, {c.a, c.b}, [&device, c](const fp8::Way& way) {
            GroupedCase in_this_way = c;
            in_this_way.way = way;
            return GroupedProduct(device, in_this_way);
        });
    }

    void add_ids(Device& device, const MulMatIdShape& shape, const Pair& pair) {
        const std::string name =
            "mul_mat_id/" + name_of(shape) + "/" + name_of(pair.a) + "x" + name_of(pair.b);
        add_ways(name, pair, [&device, shape, pair](const fp8::Way& way) {
            return MulMatId(device, shape, pair.a, pair.b, way);
        });
    }

    /// A row for each tile that is asked for, of the product that make(Way) returns.
    template <class Make>
    void add_ways(const std::string& name, const Pair& pair, Make make) {
        const auto tiles = all_tiles_ ? make(variant_).tiles() : tiles_;
        for (const auto& [tile, tile_name] : tiles)
            add_way(name + "/" + tile_name, pair, make, {variant_, tile});
        if (tiles.empty())
            add_way(name, pair, make, variant_);
    }

    template <class Make>
    void add_way(const std::string& name, const Pair& pair, Make make, const fp8::Way& way) {
        add_benchmark(name, [this, pair, make, way](benchmark::State& state) {
            auto product = make(way);
            time(state, product.data(), product.workload(), pair);
        });
    }

    void time(benchmark::State& state, OpData& data, const Workload& workload,
              const Pair& pair) const {
        const bool units = pair.a.fits_bf16() && pair.b.fits_bf16() && matrix_.rate > 0;
        const Ceiling& arithmetic = units ? matrix_ : fma_;
        const bool by_memory =
            arithmetic.rate <= 0 || workload.bytes / copy_.rate > workload.flops / arithmetic.rate;
        run_workload(state, data, workload, by_memory ? copy_ : arithmetic);
        const double mib = static_cast<double>(data.device().memory_report().bytes) / (1 << 20);
        state.counters["MiB"] = mib;
        state.SetLabel(std::to_string(static_cast<std::uint64_t>(mib)) + " MiB");
    }

    std::vector<GroupedLayout> layouts_;
    std::optional<std::vector<GroupedShape>> shapes_;
    std::optional<std::vector<MulMatIdShape>> ids_;
    std::vector<Pair> pairs_;
    DType d_ = DType::BF16;
    fp8::Variant variant_ = fp8::Variant::Device;
    std::vector<fp8::NamedTile> tiles_; ///< of --tile
    bool even_ = false;
    bool all_tiles_ = false;
    Ceiling copy_, fma_, matrix_;
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchGroupedGemm program;
    return program.run(argc, argv);
}
