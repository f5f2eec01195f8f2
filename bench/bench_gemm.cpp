// SPDX-License-Identifier: MIT
// Dense and grouped GEMM: checks samples of the product against f64, then times it, and shows the
// rate as a share of what the units of its numeric class give in a register-only loop of the same
// run: FMA units, or matrix units. `--help` lists the options.

#include "support/op_bench.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>

namespace bellows::bench {
namespace {

constexpr const char* kHelp =
    R"(bench_gemm [options] [Google Benchmark's options]

Times products D = A B (nt: B transposed, tn: A transposed; grouped: every group of rows has its own
B, tn sums over the group's rows). of_fma_peak, of_matrix_peak: share of a register-only loop.

  --shapes MxNxK,...         dense products instead of the usual ones; "none" for none
  --groups GxRxNxK,...       grouped ones: G groups of R rows on average; "none" for none
  --forms nt,nn,tn           all by default
  --storage f32,bf16         of operands and results; both by default
  --class NAME               numeric class of products of bf16 tensors (default: the device's own)
  --tiles                    times every tile of the matrix units, not only the one that is chosen
  --device INDEX|UUID|gpu|cpu
  --help

  --benchmark_filter=REGEX, --benchmark_min_time=0.1, --benchmark_out=FILE ... are the library's.
)";

struct Shape {
    std::uint64_t groups = 0; ///< 0: dense
    std::uint64_t m = 0, n = 0, k = 0;
};

struct Options {
    std::optional<std::vector<Shape>> dense, grouped;
    std::vector<GemmForm> forms = {GemmForm::NT, GemmForm::NN, GemmForm::TN};
    std::vector<DType> storage = {DType::F32, DType::BF16};
    std::string gemm_class, device;
    bool tiles = false, help = false;
};

struct Peaks {
    double fma = 0, matrix = 0; ///< GFLOPS; matrix is 0 without matrix units
};

const char* name_of(GemmForm form) {
    static constexpr const char* kNames[] = {"nt", "nn", "tn"};
    return kNames[static_cast<int>(form)];
}

std::string name_of(const Shape& s) {
    return (s.groups == 0 ? "" : std::to_string(s.groups) + "x") + std::to_string(s.m) + "x" +
           std::to_string(s.n) + "x" + std::to_string(s.k);
}

// ---- Peaks
// ---------------------------------------------------------------------------------------

/// Seconds of the fastest of many runs, 0.4 s of them in all, after one that compiles.
double best_seconds(Device& device, Recording& recording) {
    device.submit(recording).wait();
    double best = 1e30, total = 0;
    for (int run = 0; run < 10 || total < 0.4; ++run) {
        const auto begin = std::chrono::steady_clock::now();
        device.submit(recording).wait();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        total += seconds;
        best = std::min(best, seconds);
    }
    return best;
}

void expect_all(Device& device, const Buffer& sums, std::uint64_t count, float expected) {
    std::vector<float> values(count);
    device.download(sums.view(), std::span<float>(values));
    for (const float value : values)
        if (value != expected)
            throw Error(ErrorCode::Internal, "a register-only loop gives " + std::to_string(value) +
                                                 " instead of " + std::to_string(expected));
}

double fma_peak(Device& device) {
    const bool cpu = device.info().is_cpu;
    const std::uint32_t groups = cpu ? 64 : 8192, steps = cpu ? 20000 : 4096;
    kernels::PeakFma kernel;
    kernel.constants.local_size = cpu ? 8 : 256;
    const std::uint64_t invocations = std::uint64_t{groups} * kernel.constants.local_size;
    const Buffer sums(device, {.name = "sums", .bytes = invocations * 4});
    kernel.sums = sums.view();
    kernel.steps = steps;
    kernel.factor = 0.5f;
    kernel.addend = 1.0f; // every one of 8 chains tends to 2
    Recording recording(device, QueueRole::Compute, "peak");
    recording.dispatch(kernel, {groups});
    const double best = best_seconds(device, recording);
    expect_all(device, sums, invocations, 16.0f);
    return 16.0 * steps * static_cast<double>(invocations) / best * 1e-9;
}

double matrix_peak(Device& device) {
    const GemmClass& c = gemm_class(device);
    if (c.units == GemmClass::Units::None)
        return 0;
    const bool cpu = device.info().is_cpu;
    const std::uint32_t groups = cpu ? 64 : 2048, steps = cpu ? 2000 : 4096,
                        subgroups = cpu ? 1 : 8;
    kernels::PeakCoopmat kernel;
    kernel.variant = c.units == GemmClass::Units::BF16 ? kernels::PeakCoopmat::Variant::bf16
                                                       : kernels::PeakCoopmat::Variant::f16;
    kernel.constants = {device.info().subgroup_size * subgroups, c.shape.m, c.shape.n, c.shape.k};
    const std::uint64_t count = std::uint64_t{groups} * subgroups * c.shape.m * c.shape.n;
    const Buffer sums(device, {.name = "sums", .bytes = count * 4});
    kernel.sums = sums.view();
    kernel.steps = steps;
    kernel.factor = 1.0f;
    Recording recording(device, QueueRole::Compute, "peak");
    recording.dispatch(kernel, {groups});
    const double best = best_seconds(device, recording);
    expect_all(device, sums, count, 8.0f * static_cast<float>(steps * c.shape.k) + 28.0f);
    return 2.0 * 8 * steps * static_cast<double>(count) * c.shape.k / best * 1e-9;
}

// ---- Products
// ------------------------------------------------------------------------------------

/// The operands of one product, on the device and (for checking samples) as numbers. Kept from one
/// benchmark to the next, which often differs in the tile alone.
struct Product {
    Shape shape;
    GemmForm form;
    DType dtype;
    OpData data;
    TensorView a, b, d, offsets;
    std::vector<std::uint64_t> begins; ///< first row of each group, and the end
    std::vector<double> a_values, b_values;

    Product(Device& device, const Shape& s, GemmForm f, DType t)
        : shape(s), form(f), dtype(t), data(device) {
        const bool tn = form == GemmForm::TN, nt = form == GemmForm::NT;
        if (s.groups == 0) {
            a = tn ? data.random(t, {s.k, s.m}) : data.random(t, {s.m, s.k});
            b = nt ? data.random(t, {s.n, s.k}) : data.random(t, {s.k, s.n});
            d = data.empty(t, {s.m, s.n});
        } else {
            make_groups();
            const std::uint64_t rows = begins.back();
            a = tn ? data.random(t, {rows, s.n}) : data.random(t, {rows, s.k});
            b = tn   ? data.random(t, {rows, s.k})
                : nt ? data.random(t, {s.groups, s.n, s.k})
                     : data.random(t, {s.groups, s.k, s.n});
            // A weight's gradient is summed in f32.
            d = tn ? data.empty(DType::F32, {s.groups, s.n, s.k}) : data.empty(t, {rows, s.n});
        }
        a_values = data.read(a);
        b_values = data.read(b);
    }

    double num_products() const {
        const double rows = static_cast<double>(shape.groups == 0 ? shape.m : begins.back());
        return rows * static_cast<double>(shape.n) * static_cast<double>(shape.k);
    }

private:
    /// 0.7 to 1.3 times the mean, as routers give them.
    void make_groups() {
        begins = {0};
        std::uint64_t state = 1;
        std::vector<float> words;
        for (std::uint64_t g = 0; g < shape.groups; ++g) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const double factor = 0.7 + 0.6 * static_cast<double>(state >> 40) * 0x1p-24;
            begins.push_back(begins.back() +
                             static_cast<std::uint64_t>(static_cast<double>(shape.m) * factor));
        }
        offsets = data.empty(DType::U32, {shape.groups + 1});
        std::vector<std::uint32_t> values(begins.begin(), begins.end());
        data.device().upload(offsets.buffer.sub(0, values.size() * 4),
                             std::span<const std::uint32_t>(values));
    }
};

/// "" or the first of some samples that is wrong.
std::string check_samples(const Product& p) {
    const std::vector<double> d = p.data.read(p.d);
    const Shape& s = p.shape;
    const bool tn = p.form == GemmForm::TN, nt = p.form == GemmForm::NT;
    const double tolerance = p.d.dtype == DType::BF16 ? 8e-3 : 1e-4;
    std::uint64_t state = 7;
    for (int sample = 0; sample < 100; ++sample) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        // The first and the last element, then any.
        const std::uint64_t at = sample == 0   ? 0
                                 : sample == 1 ? d.size() - 1
                                               : (state >> 16) % d.size();
        double sum = 0;
        if (s.groups != 0 && tn) { // D[g][i][j] = sum over rows of A[r][i] B[r][j]
            const std::uint64_t g = at / (s.n * s.k), i = at / s.k % s.n, j = at % s.k;
            for (std::uint64_t r = p.begins[g]; r < p.begins[g + 1]; ++r)
                sum += p.a_values[r * s.n + i] * p.b_values[r * s.k + j];
        } else {
            const std::uint64_t i = at / s.n, j = at % s.n;
            const auto after = std::upper_bound(p.begins.begin(), p.begins.end(), i);
            const auto group = static_cast<std::uint64_t>(after - p.begins.begin());
            const std::uint64_t base = s.groups == 0 ? 0 : (group - 1) * s.n * s.k;
            for (std::uint64_t l = 0; l < s.k; ++l)
                sum += p.a_values[tn ? l * s.m + i : i * s.k + l] *
                       p.b_values[base + (nt ? j * s.k + l : l * s.n + j)];
        }
        const std::string wrong = compare("d", at, d[at], sum, tolerance, 1);
        if (!wrong.empty())
            return wrong;
    }
    return "";
}

Workload workload(Product& p) {
    Workload work;
    const std::uint64_t rows = p.shape.groups == 0 ? 0 : p.begins.back();
    const BufferView list =
        p.shape.groups == 0
            ? BufferView{}
            : p.data.bytes(ops::group_tiles_bytes(p.data.device(), rows, p.shape.groups));
    work.record = [&p, list, rows](Recording& recording) {
        if (p.shape.groups == 0) {
            const auto op = p.form == GemmForm::NT   ? ops::gemm_nt
                            : p.form == GemmForm::NN ? ops::gemm_nn
                                                     : ops::gemm_tn;
            op(recording, p.a, p.b, p.d, false, 1.0f);
        } else if (p.form == GemmForm::TN) {
            ops::grouped_gemm_tn(recording, p.a, p.b, p.d, p.offsets);
        } else {
            const auto tiles =
                ops::make_group_tiles(recording, p.offsets, rows, {p.shape.n, 0, 0, 0}, list);
            const auto op = p.form == GemmForm::NT ? ops::grouped_gemm_nt : ops::grouped_gemm_nn;
            op(recording, p.a, p.b, p.d, tiles, false, 1.0f);
        }
    };
    work.verify = [&p] { return check_samples(p); };
    work.flops = 2 * p.num_products();
    work.bytes = static_cast<double>(p.a.num_bytes() + p.b.num_bytes() + p.d.num_bytes());
    return work;
}

struct Program {
    Device& device;
    Peaks peaks;
    std::unique_ptr<Product> last;

    Product& product(const Shape& shape, GemmForm form, DType dtype) {
        const bool same = last && name_of(last->shape) == name_of(shape) && last->form == form &&
                          last->dtype == dtype;
        if (!same) {
            last.reset(); // its memory first
            last = std::make_unique<Product>(device, shape, form, dtype);
        }
        return *last;
    }
};

/// Tiles of NT and NN must be equally wide where a work list serves both; here one product uses it.
void force(Device& device, GemmForm form, const GemmTile& tile) {
    force_gemm_tile(device, form, tile);
    if (form == GemmForm::NN) {
        GemmTile list = tile;
        list.turn = 0;
        force_gemm_tile(device, GemmForm::NT, list);
    }
}

void run(benchmark::State& state, Program& program, const Shape& shape, GemmForm form, DType dtype,
         const std::optional<GemmTile>& tile) {
    const std::string name = gemm_class(program.device).name;
    try {
        if (tile)
            force(program.device, form, *tile);
        Product& p = program.product(shape, form, dtype);
        run_workload(state, p.data, workload(p));
        // A CPU's matrix products run on its FMA units; the loop there is only checked, compilers
        // take the products out of it.
        const bool units =
            dtype == DType::BF16 && program.peaks.matrix > 0 && !program.device.info().is_cpu;
        state.SetLabel(dtype == DType::BF16 ? name : "f32-sequential");
        state.counters[units ? "of_matrix_peak" : "of_fma_peak"] =
            static_cast<double>(state.counters["GFLOPS"]) /
            (units ? program.peaks.matrix : program.peaks.fma);
    } catch (const Error& error) {
        state.SkipWithError(error.what());
    }
    if (tile)
        use_gemm_class(program.device, name);
}

std::string short_name(const GemmTile& t) {
    return std::to_string(t.rows()) + "x" + std::to_string(t.columns()) + "x" +
           std::to_string(t.block_k) + "_warps" + std::to_string(t.warps_m) + "x" +
           std::to_string(t.warps_n) + "_stages" + std::to_string(t.stages) +
           (t.turn != 0 ? "_turned" : "");
}

void register_all(Program& program, const Options& options) {
    const bool cpu = program.device.info().is_cpu;
    std::vector<Shape> shapes = options.dense.value_or(
        cpu ? std::vector<Shape>{{0, 1024, 1024, 1024}, {0, 512, 384, 128}, {0, 256, 128, 512}}
            : std::vector<Shape>{
                  {0, 1024, 1024, 1024}, {0, 4096, 4096, 4096}, {0, 4096, 4096, 7168}});
    const std::vector<Shape> grouped = options.grouped.value_or(
        cpu ? std::vector<Shape>{{16, 24, 256, 384}}
            : std::vector<Shape>{{64, 384, 2816, 2048}, {8, 4096, 4096, 7168}});
    shapes.insert(shapes.end(), grouped.begin(), grouped.end());
    const GemmClass& c = gemm_class(program.device);
    for (const Shape& shape : shapes)
        for (const GemmForm form : options.forms)
            for (const DType dtype : options.storage) {
                std::vector<std::optional<GemmTile>> tiles = {std::nullopt};
                if (options.tiles && dtype == DType::BF16)
                    for (const GemmTile& tile : gemm_tiles(program.device.info(), c, form))
                        if (shape.groups == 0 || form == GemmForm::TN ||
                            tile.rows() == group_tile_rows(program.device.info()))
                            tiles.push_back(tile);
                for (const auto& tile : tiles) {
                    const std::string name = (shape.groups == 0 ? "gemm_" : "grouped_gemm_") +
                                             std::string(name_of(form)) + "/" + name_of(shape) +
                                             "/" + to_string(dtype) +
                                             (tile ? "/" + short_name(*tile) : "");
                    benchmark::RegisterBenchmark(
                        name.c_str(),
                        [&program, shape, form, dtype, tile](benchmark::State& state) {
                            run(state, program, shape, form, dtype, tile);
                        })
                        ->UseManualTime()
                        ->Unit(benchmark::kMicrosecond);
                }
            }
}

// ---- Options
// -------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::InvalidArgument, what + "; see bench_gemm --help");
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t comma = std::min(text.find(',', at), text.size());
        parts.push_back(text.substr(at, comma - at));
        at = comma + 1;
    }
    return parts;
}

std::vector<Shape> shapes_of(const std::string& text, bool grouped) {
    std::vector<Shape> shapes;
    if (text == "none")
        return shapes;
    for (const std::string& part : split(text)) {
        unsigned long long v[4] = {};
        int used = -1;
        const int count =
            grouped
                ? std::sscanf(part.c_str(), "%llux%llux%llux%llu%n", v, v + 1, v + 2, v + 3, &used)
                : std::sscanf(part.c_str(), "%llux%llux%llu%n", v + 1, v + 2, v + 3, &used);
        const bool zero = (grouped && v[0] == 0) || v[1] == 0 || v[2] == 0 || v[3] == 0;
        if (count != (grouped ? 4 : 3) || used != static_cast<int>(part.size()) || zero)
            refuse("\"" + part + "\" is no " + (grouped ? "GxRxNxK" : "MxNxK"));
        shapes.push_back({v[0], v[1], v[2], v[3]});
    }
    return shapes;
}

/// Takes the program's own options out of argv.
Options parse(int& argc, char** argv) {
    Options options;
    int kept = 1;
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 >= argc)
                refuse(option + " needs a value");
            return argv[++i];
        };
        if (option == "--help" || option == "-h") {
            options.help = true;
        } else if (option == "--tiles") {
            options.tiles = true;
        } else if (option == "--class") {
            options.gemm_class = value();
        } else if (option == "--device") {
            options.device = value();
        } else if (option == "--shapes") {
            options.dense = shapes_of(value(), false);
        } else if (option == "--groups") {
            options.grouped = shapes_of(value(), true);
        } else if (option == "--forms") {
            options.forms.clear();
            for (const std::string& form : split(value())) {
                if (form != "nt" && form != "nn" && form != "tn")
                    refuse("\"" + form + "\" is no form");
                options.forms.push_back(form == "nt"   ? GemmForm::NT
                                        : form == "nn" ? GemmForm::NN
                                                       : GemmForm::TN);
            }
        } else if (option == "--storage") {
            options.storage.clear();
            for (const std::string& dtype : split(value())) {
                if (dtype != "f32" && dtype != "bf16")
                    refuse("\"" + dtype + "\" is no storage");
                options.storage.push_back(dtype == "f32" ? DType::F32 : DType::BF16);
            }
        } else {
            argv[kept++] = argv[i];
        }
    }
    argc = kept;
    return options;
}

int run_program(int argc, char** argv) {
    const Options options = parse(argc, argv);
    if (options.help) {
        std::cout << kHelp;
        return 0;
    }
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv))
        return 2;
    DeviceOptions device_options = DeviceOptions::from_environment({});
    if (!options.device.empty())
        device_options.select = options.device;
    if (!options.gemm_class.empty())
        device_options.gemm_class = options.gemm_class;
    const std::unique_ptr<Device> device = Device::create(device_options);
    Program program{*device, {fma_peak(*device), matrix_peak(*device)}, nullptr};
    benchmark::AddCustomContext("device", device->info().name + ", " + device->info().driver);
    benchmark::AddCustomContext("fma_peak_gflops", std::to_string(program.peaks.fma));
    for (const GemmClass& c : gemm_classes(*device))
        benchmark::AddCustomContext("class " + c.name, c.why_not.empty() ? "available" : c.why_not);
    benchmark::AddCustomContext("class of bf16 products", gemm_class(*device).name);
    if (program.peaks.matrix > 0 && !device->info().is_cpu)
        benchmark::AddCustomContext("matrix_peak_gflops", std::to_string(program.peaks.matrix));
    register_all(program, options);
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    try {
        return bellows::bench::run_program(argc, argv);
    } catch (const bellows::Error& error) {
        std::cerr << error.what() << "\n";
        switch (error.code()) {
        case bellows::ErrorCode::InvalidArgument:
            return 2;
        case bellows::ErrorCode::Unsupported:
            return 3;
        default:
            return 1;
        }
    }
}
