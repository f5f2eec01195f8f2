// SPDX-License-Identifier: MIT
// Dense and grouped GEMM: checks samples of the product against f64, then times it, and shows the
// rate as a share of what the units of its numeric class give in a register-only loop of the same
// run: FMA units, or matrix units. `--help` lists the options.

#include "gemm/product.hpp"
#include "support/peaks.hpp"
#include "support/program.hpp"

#include <bellows/base/error.hpp>

#include <memory>
#include <optional>

namespace bellows::bench {
namespace {

constexpr const char* kHelp =
    R"(bench_gemm: products D = A B (nt: B transposed, tn: A transposed), dense and grouped (every group
of rows has its own B; tn sums over the group's rows). "of peak" is the share of a register-only loop
of the same run: of the matrix units where the product's class uses them, else of the FMA units.

  --shapes MxNxK,...         dense products instead of the usual ones; "none" for none
  --groups GxRxNxK,...       grouped ones: G groups of R rows on average; "none" for none
  --forms nt,nn,tn           all by default
  --storage f32,bf16         of operands and results; both by default
  --class NAME               numeric class of products of bf16 tensors (default: the device's own)
  --tiles                    times every tile of the matrix units, not only the one that is chosen
)";

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::InvalidArgument, what + "; see bench_gemm --help");
}

std::optional<std::vector<Shape>> shapes_of(Arguments& arguments, const std::string& name,
                                            const std::string& form) {
    const auto lists = arguments.sizes(name, form);
    if (!lists)
        return std::nullopt;
    std::vector<Shape> shapes;
    for (const auto& v : *lists)
        shapes.push_back(v.size() == 3 ? Shape{0, v[0], v[1], v[2]}
                                       : Shape{v[0], v[1], v[2], v[3]});
    return shapes;
}

GemmForm form_of(const std::string& text) {
    for (const GemmForm form : {GemmForm::NT, GemmForm::NN, GemmForm::TN})
        if (text == name_of(form))
            return form;
    refuse("\"" + text + "\" is no form");
}

std::string short_name(const GemmTile& t) {
    return std::to_string(t.rows()) + "x" + std::to_string(t.columns()) + "x" +
           std::to_string(t.block_k) + "_warps" + std::to_string(t.warps_m) + "x" +
           std::to_string(t.warps_n) + "_stages" + std::to_string(t.stages) +
           (t.turn != 0 ? "_turned" : "");
}

class BenchGemm : public Program {
public:
    std::string help() const override { return kHelp; }

    void take(Arguments& arguments) override {
        tiles_ = arguments.flag("--tiles");
        class_ = arguments.value("--class").value_or("");
        dense_ = shapes_of(arguments, "--shapes", "MxNxK");
        grouped_ = shapes_of(arguments, "--groups", "GxRxNxK");
        if (const auto text = arguments.value("--forms")) {
            forms_.clear();
            for (const std::string& form : Arguments::split(*text))
                forms_.push_back(form_of(form));
        }
        storage_ = arguments.storage("--storage");
    }

    void configure(DeviceOptions& options) const override {
        if (!class_.empty())
            options.gemm_class = class_;
    }

    void add(Device& device) override {
        const bool cpu = device.info().is_cpu;
        add_peaks(device);
        std::vector<Shape> shapes = dense_.value_or(
            cpu ? std::vector<Shape>{{0, 1024, 1024, 1024}, {0, 512, 384, 128}, {0, 256, 128, 512}}
                : std::vector<Shape>{
                      {0, 1024, 1024, 1024}, {0, 4096, 4096, 4096}, {0, 4096, 4096, 7168}});
        const std::vector<Shape> grouped = grouped_.value_or(
            cpu ? std::vector<Shape>{{16, 24, 256, 384}}
                : std::vector<Shape>{{64, 384, 2816, 2048}, {8, 4096, 4096, 7168}});
        shapes.insert(shapes.end(), grouped.begin(), grouped.end());
        for (const Shape& shape : shapes)
            for (const GemmForm form : forms_)
                for (const DType dtype : storage_)
                    for (const auto& tile : tiles_for(device, shape, form, dtype))
                        add_product(device, shape, form, dtype, tile);
    }

private:
    void add_peaks(Device& device) {
        fma_ = measure(device, fma_peak);
        matrix_ = measure(device, matrix_peak);
        add_context("class of bf16 products", gemm_class(device).name);
        for (const GemmClass& c : gemm_classes(device))
            if (!c.why_not.empty())
                add_context("without " + c.name, c.why_not);
    }

    /// The tile that the library chooses, and with --tiles all others that can compute the product.
    std::vector<std::optional<GemmTile>> tiles_for(const Device& device, const Shape& shape,
                                                   GemmForm form, DType dtype) const {
        std::vector<std::optional<GemmTile>> tiles = {std::nullopt};
        if (tiles_ && dtype == DType::BF16)
            for (const GemmTile& tile : gemm_tiles(device.info(), gemm_class(device), form))
                if (shape.groups == 0 || form == GemmForm::TN ||
                    tile.rows() == group_tile_rows(device.info()))
                    tiles.emplace_back(tile);
        return tiles;
    }

    void add_product(Device& device, const Shape& shape, GemmForm form, DType dtype,
                     const std::optional<GemmTile>& tile) {
        const std::string name = (shape.groups == 0 ? "gemm_" : "grouped_gemm_") +
                                 std::string(name_of(form)) + "/" + name_of(shape) + "/" +
                                 to_string(dtype) + (tile ? "/" + short_name(*tile) : "");
        add_benchmark(name, [this, &device, shape, form, dtype, tile](benchmark::State& state) {
            const std::string numerics = gemm_class(device).name;
            if (tile)
                force(device, form, *tile);
            time(state, product(device, shape, form, dtype));
            if (tile)
                use_gemm_class(device, numerics);
        });
    }

    void time(benchmark::State& state, Product& product) const {
        const bool units = product.dtype == DType::BF16 && matrix_.rate > 0;
        run_workload(state, product.data(), product.workload(), units ? matrix_ : fma_);
        state.SetLabel(product.dtype == DType::BF16 ? gemm_class(product.data().device()).name
                                                    : "f32-sequential");
    }

    /// Tiles of NT and NN must be equally wide where a work list serves both; here one product uses
    /// it.
    static void force(Device& device, GemmForm form, const GemmTile& tile) {
        force_gemm_tile(device, form, tile);
        if (form == GemmForm::NN) {
            GemmTile list = tile;
            list.turn = 0;
            force_gemm_tile(device, GemmForm::NT, list);
        }
    }

    /// Kept from one benchmark to the next, which often differs in the tile alone.
    Product& product(Device& device, const Shape& shape, GemmForm form, DType dtype) {
        const bool same =
            last_ && last_->shape == shape && last_->form == form && last_->dtype == dtype;
        if (!same) {
            last_.reset(); // its memory first
            last_ = std::make_unique<Product>(device, shape, form, dtype);
        }
        return *last_;
    }
    void finish() override { last_.reset(); }

    std::optional<std::vector<Shape>> dense_, grouped_;
    std::vector<GemmForm> forms_ = {GemmForm::NT, GemmForm::NN, GemmForm::TN};
    std::vector<DType> storage_;
    std::string class_;
    bool tiles_ = false;
    Ceiling fma_, matrix_;
    std::unique_ptr<Product> last_;
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchGemm program;
    return program.run(argc, argv);
}
