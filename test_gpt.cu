// test_gpt.cu: the trainer against goldens: logits, losses and every gradient of a model at some T and p, and five AdamW
// steps, computed in float64 by an independent program (dev/reference/caat_reference.py).
//
//   ./test_gpt                                                              the project's own goldens, dev/golden
//   ./test_gpt --golden DIR --init-from HF_DIR --batch FILE.i32 [--dtype fp32]     any other
//
// Ranks are threads, or processes under mpirun -n T. The trainer is included whole, so what is tested is what runs.
#include <CLI/CLI.hpp>  // first: base.h's check() is a macro, CLI11's a method

#define main train_gpt_main
#include "train_gpt.cu"
#undef main

// Relative errors that a type allows. fp32: INTERFACE's; bf16: the band that 8 bits of mantissa leave over a few layers.
struct Tolerance {
    double logits_max, logits_l2, loss_per_token, grad, grad_of_all, losses, grad_norms;
};
constexpr Tolerance FP32_TOLERANCE = {3e-5, 1e-5, 1e-4, 1e-4, 1e-7, 2e-3, 5e-3};
constexpr Tolerance BF16_TOLERANCE = {4e-2, 2e-2, 2e-1, 8e-2, 2e-2, 5e-2, 1e-1};

struct Verdict {
    bool passed = true;
    std::string text;
    // !(found <= allowed): a NaN fails.
    void judge(const char* what, double found, double allowed) {
        const bool bad = !(found <= allowed);
        passed = passed && !bad;
        text += format("  %s %.1e%s", what, found, bad ? format(" > %.1e FAIL", allowed).c_str() : "");
    }
};

template <typename Y>
std::vector<Y> read_array(const std::string& path, i64 count) {
    File file(path, "rb");
    check(file.size() == count * (i64)sizeof(Y), "'%s' has %lld bytes, wanted %lld", path.c_str(), (long long)file.size(), (long long)(count * (i64)sizeof(Y)));
    std::vector<Y> values(count);
    file.read(values.data(), count * sizeof(Y));
    return values;
}

// Every rank's host array of `count` floats (counts may differ), on every rank.
std::vector<std::vector<float>> gather_arrays(const std::vector<float>& mine, Comm& comm) {
    const i64 count = (i64)mine.size();
    std::vector<i64> counts(comm.size);
    comm.share(&count, counts.data(), sizeof(i64));
    const i64 longest = *std::max_element(counts.begin(), counts.end());
    std::vector<float> padded(mine), all(longest * comm.size);
    padded.resize(longest);
    comm.share(padded.data(), all.data(), longest * (i64)sizeof(float));
    std::vector<std::vector<float>> parts;
    for (int r = 0; r < comm.size; r++) { parts.emplace_back(all.begin() + r * longest, all.begin() + r * longest + counts[r]); }
    return parts;
}

// The unsharded tensors, by Hugging Face name, from all ranks' allocations.
std::map<std::string, std::vector<float>> assemble(const ModelConfig& m, const std::vector<std::vector<float>>& families) {
    std::map<std::string, std::vector<float>> whole;
    const int T = (int)families.size();
    for (int rank = 0; rank < T; rank++) {
        const ParameterTable table(m, parameter_specs(m), T, rank);
        for (const Tensor& t : table.tensors()) {
            for (const Slice& s : t.slices) {
                std::vector<float>& out = whole[s.part.name];
                out.resize(s.part.hf_rows * s.hf_cols);
                for (i64 i = 0; i < s.rows; i++) {
                    for (i64 j = 0; j < s.cols; j++) { out[s.hf_index(i, j)] = families[rank][t.offset + (s.local_row + i) * t.cols + j]; }
                }
            }
        }
    }
    return whole;
}

// The logits of all rows, (N, V), on every rank.
template <typename X>
std::vector<float> all_logits(Trainer<X>& trainer, i64 N) {
    Model<X>& model = trainer.model;
    Arena arena("logits");
    float* logits;
    arena.add(&logits, N * model.r.Vr);
    arena.allocate();
    matmul_forward(logits, model.r.Vr, trainer.acts[0].n_out, model.w.head, (const X*)nullptr, N, model.r.C, model.r.Vr, 1.0f, model.run);
    std::vector<float> mine(N * model.r.Vr);
    copy_to_host(mine.data(), logits, N * model.r.Vr, model.run);
    const auto parts = gather_arrays(mine, model.tp.comm);
    std::vector<float> all;
    for (i64 n = 0; n < N; n++) {
        for (const auto& part : parts) {
            const i64 rows = (i64)part.size() / N;
            all.insert(all.end(), part.begin() + n * rows, part.begin() + (n + 1) * rows);
        }
    }
    return all;
}

template <typename X>
Verdict compare(const Options& o, Ranks& ranks, Run& run, const std::string& dir, const json& golden, const std::string& batch_file) {
    const i64 B = o.micro_batch, S = o.seq, N = B * S, V = o.shape.vocab;
    Tolerance allowed = dtype_of<X> == DType::FP32 ? FP32_TOLERANCE : BF16_TOLERANCE;
    if (dtype_of<X> == DType::FP32 && golden.contains("steps_tolerance")) {
        allowed.losses = golden["steps_tolerance"]["losses"], allowed.grad_norms = golden["steps_tolerance"]["grad_norms"];
    }
    const auto windows = read_array<int32_t>(batch_file, B * (S + 1));
    for (int32_t id : windows) { check(id >= 0 && id < V, "'%s' holds the id %d, but V is %lld", batch_file.c_str(), id, (long long)V); }
    Trainer<X> trainer(o, ranks, run, true);
    trainer.allocate();
    const HfWeights weights(o.init_from, o.shape, parameter_specs(o.shape));
    trainer.load(new_weights(o, trainer.model.tp, &weights));
    Verdict verdict;

    // One forward and backward.
    trainer.upload(trainer.acts[0], windows.data(), B);
    complete(trainer.model.forward(trainer.acts[0], B, S, 0), *ranks.tp);
    const auto logits = all_logits(trainer, N), logits_wanted = read_array<float>(dir + "/logits.f32", N * V);
    double worst = 0, largest = 0, square = 0, square_wanted = 0;
    for (i64 i = 0; i < N * V; i++) {
        const double d = (double)logits[i] - logits_wanted[i];
        worst = !(std::abs(d) <= worst) ? std::abs(d) : worst;
        largest = std::max(largest, std::abs((double)logits_wanted[i]));
        square += d * d, square_wanted += (double)logits_wanted[i] * logits_wanted[i];
    }
    verdict.judge("logits max", worst / largest, allowed.logits_max);
    verdict.judge("l2", std::sqrt(square / square_wanted), allowed.logits_l2);

    complete(trainer.model.head(trainer.acts[0], N, (float)(1.0 / (double)N), GradMode::WRITE, true), *ranks.tp);
    std::vector<float> losses(N);
    copy_to_host(losses.data(), trainer.acts[0].losses, N, run);
    const auto losses_wanted = read_array<float>(dir + "/loss_per_token.f32", N);
    worst = 0;
    for (i64 i = 0; i < N; i++) { worst = !(std::abs((double)losses[i] - losses_wanted[i]) <= worst) ? std::abs((double)losses[i] - losses_wanted[i]) : worst; }
    verdict.judge("token loss", worst, allowed.loss_per_token);

    complete(trainer.model.backward(trainer.acts[0], B, S, GradMode::WRITE), *ranks.tp);
    trainer.optimizer.reduce_gradients();
    const auto grads = assemble(o.shape, gather_arrays(trainer.model.grads.to_host(run), *ranks.tp));
    const SafetensorsFile wanted(dir + "/grads.safetensors");
    std::map<std::string, std::pair<double, double>> errors;  // name -> |d|, |g|
    double all = 0;
    for (const auto& [name, entry] : wanted.entries()) {
        const auto found = grads.find(name);
        check(found != grads.end(), "'%s' has a gradient '%s' that this model lacks", wanted.path().c_str(), name.c_str());
        std::vector<float> g(found->second.size());
        check(entry.end - entry.begin == (i64)(g.size() * sizeof(float)), "gradient '%s' has %zu elements here, another number in '%s'", name.c_str(), g.size(), wanted.path().c_str());
        wanted.read(entry, 0, (i64)g.size(), g.data());
        double d2 = 0, g2 = 0;
        for (size_t i = 0; i < g.size(); i++) { d2 += ((double)found->second[i] - g[i]) * ((double)found->second[i] - g[i]), g2 += (double)g[i] * g[i]; }
        errors[name] = {std::sqrt(d2), std::sqrt(g2)};
        all += g2;
    }
    check(errors.size() == grads.size(), "'%s' has %zu gradients, this model %zu", wanted.path().c_str(), errors.size(), grads.size());
    double worst_share = 0;
    std::string worst_name;
    for (const auto& [name, e] : errors) {
        const double share = e.first / (allowed.grad * e.second + allowed.grad_of_all * std::sqrt(all));
        if (!(share <= worst_share)) { worst_share = share, worst_name = name; }
    }
    verdict.judge(format("gradients (%s, as a share of what is allowed)", worst_name.c_str()).c_str(), worst_share, 1.0);

    // Five steps of AdamW on the same batch.
    double worst_loss = 0, worst_norm = 0;
    for (size_t t = 0; t < golden["losses"].size(); t++) {
        const StepResult step = trainer.step(windows.data(), (i64)t + 1);
        const double loss = golden["losses"][t], norm = golden["grad_norms"][t];
        const double loss_error = std::abs(step.loss - loss) / std::abs(loss), norm_error = std::abs(step.grad_norm - norm) / norm;
        worst_loss = !(loss_error <= worst_loss) ? loss_error : worst_loss, worst_norm = !(norm_error <= worst_norm) ? norm_error : worst_norm;
    }
    verdict.judge("5 steps: loss", worst_loss, allowed.losses);
    verdict.judge("norm", worst_norm, allowed.grad_norms);
    return verdict;
}

int test_golden(const std::string& dir, const std::string& hf, const std::string& batch, const std::string& dtype, const std::string& grad_dtype, int zero, int recompute) {
    const std::string path = dir + "/golden.json";
    const json golden = read_json(path);
    Options o;
    o.shape = read_hf_config(hf), o.init_from = hf;
    o.arch = o.shape.is_llama() ? "llama" : "gpt", o.positions = o.shape.rotary ? "rotary" : "learned";
    o.tp = golden.at("T"), o.sync_factor = golden.at("p"), o.dp = 1, o.zero = zero, o.recompute = recompute;
    o.private_scale = golden.value("private_scale", "forward"), o.shape.vocab_multiple = golden.value("vocab_multiple", 0);
    o.micro_batch = o.global_batch = golden.at("batch_shape").at(0);
    o.seq = golden.at("batch_shape").at(1).get<i64>() - 1;
    const json& adam = golden.at("adamw");
    o.lr = adam.at("lr"), o.min_lr = 0, o.warmup = 0, o.schedule = "constant", o.beta1 = adam.at("beta1"), o.beta2 = adam.at("beta2"), o.eps = adam.at("eps");
    o.weight_decay = adam.at("weight_decay"), o.clip = adam.at("clip"), o.dtype = dtype, o.grad_dtype = grad_dtype;
    finish_model(o.shape);
    check_split(o.shape, o.tp, o.sync_factor);
    return launch(o.tp, 1, [&](Ranks& host) {
        DeviceRank rank(host, o.threads, o.comm_timeout);
        const Verdict v = dtype == "bf16" ? compare<bf16>(o, rank.ranks, rank.run, dir, golden, batch) : compare<float>(o, rank.ranks, rank.run, dir, golden, batch);
        if (host.world->rank == 0) {
            printf("%s %s T=%d p=%g %s:%s\n", v.passed ? "ok  " : "FAIL", dir.c_str(), o.tp, o.sync_factor, dtype.c_str(), v.text.c_str());
            fflush(stdout);
        }
        return v.passed ? EXIT_OK : EXIT_FAILED;
    });
}

int main(int argc, char** argv) {
    CLI::App app("Compares the trainer with goldens made by an independent float64 program. Exit code 0 only if all agree.");
    std::string golden, hf, batch, dtype = "fp32", grad_dtype = "fp32";
    int zero = 0, recompute = 1;
    app.add_option("--golden", golden, "folder with golden.json, logits.f32, loss_per_token.f32, grads.safetensors; none: all of dev/golden");
    app.add_option("--init-from", hf, "Hugging Face folder of the model (default: named in golden.json)");
    app.add_option("--batch", batch, "int32 ids of the batch's shape (default: named in golden.json)");
    app.add_option("--dtype", dtype, "fp32 (judged by the tolerances of the interface) or bf16 (by a band)");
    app.add_option("--grad-dtype", grad_dtype, "as the trainer's");
    app.add_option("--zero", zero, "as the trainer's");
    app.add_option("--recompute", recompute, "as the trainer's");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return error.get_exit_code() == 0 ? app.exit(error) : (app.exit(error), (int)EXIT_USAGE);
    }
    try {
        if (dtype != "fp32" && dtype != "bf16") { usage_error("--dtype is '%s': wanted fp32 or bf16", dtype.c_str()); }
        if (grad_dtype != "fp32" && (grad_dtype != "bf16" || dtype != "bf16")) { usage_error("--grad-dtype is '%s': wanted fp32, or bf16 with --dtype bf16", grad_dtype.c_str()); }
        if (zero < 0 || zero > 1 || recompute < 0 || recompute > 2) { usage_error("--zero is %d, --recompute %d: wanted 0 or 1, and 0 to 2", zero, recompute); }
        std::vector<std::string> dirs{golden};
        if (golden.empty() && launched_world().by_mpi) { usage_error("under mpirun one golden is tested at a time\nHINT: --golden DIR, with -n T of that golden"); }
        if (golden.empty()) {
            dirs.clear();
            for (const auto& entry : std::filesystem::directory_iterator("dev/golden")) {
                if (path_exists(entry.path().string() + "/grads.safetensors")) { dirs.push_back(entry.path().string()); }
            }
            std::sort(dirs.begin(), dirs.end());
            check(!dirs.empty(), "no goldens in dev/golden\nHINT: run in the folder of the checkout");
        }
        int failed = 0;
        for (const std::string& dir : dirs) {
            const json facts = read_json(dir + "/golden.json");
            const std::string model = !hf.empty() ? hf : dir + "/" + facts.value("model", ""), file = !batch.empty() ? batch : dir + "/" + facts.value("batch", "");
            failed += test_golden(dir, model, file, dtype, grad_dtype, zero, recompute) != EXIT_OK;
        }
        if (launched_world().rank == 0) { printf("%zu goldens, %d failed\n", dirs.size(), failed); }
        return failed == 0 ? EXIT_OK : EXIT_FAILED;
    } catch (const std::exception& error) {
        return report_error(error);
    }
}
