// flags.cpp: parsing of flags.h's table, and what follows from the flags before anything else runs.
#include <CLI/CLI.hpp>  // first: base.h's check() is a macro, CLI11's a method

#include "flags.h"

#include "checkpoint_load.h"
#include "huggingface.h"
#include "launch.h"

namespace {

// The value that --name has on the command line ("" if it has none): needed before parsing, because presets and
// checkpoints set the defaults that the parser shows and the flags override.
std::string peek(int argc, char** argv, const std::string& name) {
    std::string found;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == name && i + 1 < argc) { found = argv[i + 1]; }
        if (arg.rfind(name + "=", 0) == 0) { found = arg.substr(name.size() + 1); }
    }
    return found;
}
bool peek_switch(int argc, char** argv, const std::string& name) {
    for (int i = 1; i < argc; i++) {
        if (std::string(argv[i]).rfind(name + "=", 0) == 0) { usage_error("'%s': %s takes no value\nHINT: just %s", argv[i], name.c_str(), name.c_str()); }
    }
    return std::any_of(argv + 1, argv + argc, [&](const char* arg) { return name == arg; });
}

std::string preset_names() {
    std::string names;
    for (const Preset& p : presets()) { names += std::string(names.empty() ? "" : ", ") + p.name; }
    return names;
}

void apply_preset(Options& o, const std::string& name) {
    for (const Preset& p : presets()) {
        if (name != p.name) { continue; }
        o.model = name;
        o.shape = p.model;
        o.seq = p.seq, o.global_batch = p.global_batch, o.lr = p.lr, o.warmup = p.warmup, o.eps = p.adam_eps;
        return;
    }
    usage_error("--model is '%s': no such preset\nHINT: there are %s; or give --arch, --layers, --channels, ... beside one of them", name.c_str(),
                preset_names().c_str());
}

// "--sync-factor" <-> "sync_factor"
std::string key_of(const std::string& flag) {
    std::string key = flag.substr(2);
    std::replace(key.begin(), key.end(), '-', '_');
    return key;
}
std::string flag_of(std::string key) {
    std::replace(key.begin(), key.end(), '_', '-');
    return "--" + key;
}

json to_json(const Options& options) {
    json j = json::object();
    visit_flags(const_cast<Options&>(options), [&](const char*, const char* flag, auto& field, const char*) { j[key_of(flag)] = field; });
    return j;
}
i64 edit_distance(const std::string& a, const std::string& b) {
    std::vector<i64> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) { row[j] = j; }
    for (size_t i = 1; i <= a.size(); i++) {
        i64 diagonal = row[0]++;
        for (size_t j = 1; j <= b.size(); j++) {
            const i64 substitute = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
        }
    }
    return row[b.size()];
}
std::string nearest_flag(Options& o, const std::string& unknown) {
    std::string best;
    visit_flags(o, [&](const char*, const char* flag, auto&, const char*) {
        if (best.empty() || edit_distance(unknown, flag) < edit_distance(unknown, best)) { best = flag; }
    });
    return best;
}

void one_of(const std::string& value, const char* flag, std::initializer_list<const char*> legal) {
    std::string list;
    for (const char* word : legal) {
        if (value == word) { return; }
        list += (list.empty() ? "" : ", ") + std::string(word);
    }
    usage_error("%s is '%s': wanted one of %s", flag, value.c_str(), list.c_str());
}
void at_least(double value, double least, const char* flag) {
    if (!(value >= least)) { usage_error("%s is %g: wanted %g or more", flag, value, least); }
}
// What a computation keeps in fp32 must not become 0 or infinity there.
void fits_float(double value, const char* flag) {
    const float f = (float)value;
    if (!std::isfinite(f) || (value != 0 && f == 0)) { usage_error("%s is %g: wanted a value that fp32 can hold", flag, value); }
}
void within(double value, double low, double high, const char* flag) {
    if (!(value >= low && value <= high)) { usage_error("%s is %g: wanted a number from %g to %g", flag, value, low, high); }
}

// What is part of a checkpoint's model may be left out, or repeated, never changed.
void compare_with_checkpoint(const Options& o, const Options& saved, const std::string& where) {
    const json now = to_json(o), then = to_json(saved);
    const bool plain = saved.sync_factor == 1.0 && o.sync_factor == 1.0;
    for (const char* key : {"arch", "layers", "channels", "heads", "kv_heads", "head_size", "ffn", "vocab", "tie", "positions", "rope_base", "norm_eps",
                            "vocab_multiple", "sync_factor", "private_scale", "tp"}) {
        if (now[key] == then[key] || (plain && (std::string(key) == "tp" || std::string(key) == "private_scale"))) { continue; }
        const bool caat = std::string(key) == "tp" || std::string(key) == "sync_factor";
        usage_error("%s is %s, but the checkpoint '%s' was made with %s\nHINT: %s", flag_of(key).c_str(), now[key].dump().c_str(), where.c_str(), then[key].dump().c_str(),
                    caat ? "with --sync-factor below 1 the number of ranks is part of the model: leave the flag out to use the checkpoint's own "
                           "(ranks without mpirun are threads, so any --tp runs on one machine)"
                         : "leave the flag out to use the checkpoint's own");
    }
}

// A flag that is given and changes nothing is said, not refused: scripts pass the same flags to many runs.
void note_ineffective(const Options& o, const std::function<bool(const char*)>& given) {
    auto note = [&](bool idle, const char* flag, const char* why) {
        if (idle && given(flag)) { fprintf(stderr, "note: %s has no effect: %s\n", flag, why); }
    };
    note(o.val.empty() && o.split.empty(), "--val-every", "there is no --val");
    note(o.val.empty() && o.split.empty(), "--val-batches", "there is no --val");
    note(o.schedule != "wsd", "--wsd-decay", "it belongs to --schedule wsd");
    note(o.schedule == "wsd" || o.schedule == "constant", "--decay-steps", "it belongs to --schedule cosine or linear");
    note(o.schedule == "constant", "--min-lr", "--schedule constant has no floor");
    note(o.dtype == "fp32", "--rounding", "weights are fp32");
    note(!o.shape.rotary, "--rope-base", "positions are learned");
    note(o.out.empty() && !o.uses_a_model(), "--keep", "there is no --out");
    note(o.log.empty(), "--insight-every", "there is no --log");
    if (!o.uses_a_model() && !o.dry_run && o.steps > 0 && o.warmup >= o.steps) {
        fprintf(stderr, "note: --warmup is %lld and --steps %lld: the learning rate never reaches its peak\n", (long long)o.warmup, (long long)o.steps);
    }
}

void finish(Options& o) {
    one_of(o.arch, "--arch", {"llama", "gpt"});
    one_of(o.positions, "--positions", {"rotary", "learned"});
    o.shape.arch = o.arch == "gpt" ? Arch::GPT : Arch::LLAMA;
    o.shape.rotary = o.positions == "rotary";
    constexpr double MOST = 1 << 30;  // no count here is larger; products of a few of them fit in 64 bits
    for (const auto& [value, flag] : std::initializer_list<std::pair<i64, const char*>>{{o.seq, "--seq"}, {o.micro_batch == -1 ? 1 : o.micro_batch, "--micro-batch"}, {o.global_batch, "--global-batch"}}) {
        within((double)value, 1, MOST, flag);
    }
    if (o.interleave && o.micro_batch > 0 && o.micro_batch % 2 != 0) {
        usage_error("--micro-batch is %lld: --interleave wants an even number, to halve it\nHINT: --micro-batch %lld", (long long)o.micro_batch, (long long)o.micro_batch + 1);
    }
    within((double)o.overlap_batches, 1, (double)(Comm::MAX_IN_FLIGHT / o.passes_at_once()), "--overlap-batches");
    within((double)o.steps, 0, 1e12, "--steps");
    if (o.shape.max_positions == 0) { o.shape.max_positions = o.seq; }
    finish_model(o.shape);
    check_split(o.shape, o.tp, o.sync_factor);
    if (!o.shape.rotary && o.seq > o.shape.max_positions) {
        usage_error("--seq is %lld, but the model has %lld learned positions\nHINT: --seq %lld", (long long)o.seq, (long long)o.shape.max_positions,
                    (long long)o.shape.max_positions);
    }
    one_of(o.order, "--order", {"auto", "windows", "megatron"});
    one_of(o.private_scale, "--private-scale", {"forward", "init", "none"});
    one_of(o.rounding, "--rounding", {"nearest", "stochastic"});
    one_of(o.schedule, "--schedule", {"cosine", "linear", "wsd", "constant"});
    one_of(o.dtype, "--dtype", {"auto", "fp32", "bf16"});
    one_of(o.grad_dtype, "--grad-dtype", {"fp32", "bf16"});
    if (o.grad_dtype == "bf16" && o.dtype != "bf16" && !o.uses_a_model()) {
        usage_error("--grad-dtype is bf16, but --dtype is %s: wanted bf16 for both\nHINT: --dtype bf16, or --grad-dtype fp32", o.dtype.c_str());
    }
    one_of(o.reduce_dtype, "--reduce-dtype", {"auto", "fp32", "bf16"});
    within(o.zero, 0, 1, "--zero");
    within(o.recompute, 0, 2, "--recompute");
    within(o.dp, 0, 1 << 20, "--dp");
    at_least(o.lr, 0, "--lr"), at_least(o.warmup, 0, "--warmup");
    for (const auto& [value, flag] : std::initializer_list<std::pair<double, const char*>>{{o.lr, "--lr"}, {o.eps, "--eps"}, {o.weight_decay, "--weight-decay"}, {o.clip, "--clip"},
             {o.shape.norm_eps, "--norm-eps"}, {o.shape.rope_base, "--rope-base"}}) {
        fits_float(value, flag);
    }
    if (o.min_lr < 0) { o.min_lr = o.lr / 10; }
    within(o.min_lr, 0, o.lr, "--min-lr");
    at_least(o.decay_steps, 0, "--decay-steps"), at_least(o.wsd_decay, 0, "--wsd-decay"), at_least(o.weight_decay, 0, "--weight-decay");
    within(o.beta1, 0, 0.999999, "--beta1"), within(o.beta2, 0, 0.9999999, "--beta2");
    if (!(o.comm_timeout > 0)) { usage_error("--comm-timeout is %g: wanted a number of seconds above 0", o.comm_timeout); }
    if (!(o.eps > 0)) { usage_error("--eps is %g: wanted a number above 0", o.eps); }
    at_least(o.clip, 0, "--clip"), at_least(o.skip_spikes, 0, "--skip-spikes");
    for (const auto& [value, flag] : std::initializer_list<std::pair<i64, const char*>>{{o.save_every, "--save-every"}, {o.keep, "--keep"},
             {o.val_every, "--val-every"}, {o.val_batches, "--val-batches"}, {o.sample_every, "--sample-every"}, {o.insight_every, "--insight-every"},
             {o.threads, "--threads"}, {o.top_k, "--top-k"}}) {
        at_least(value, 0, flag);
    }
    at_least(o.temperature, 0, "--temperature");
    if (!(o.top_p > 0 && o.top_p <= 1)) { usage_error("--top-p is %g: wanted a number above 0 and up to 1 (1: all tokens)", o.top_p); }
    if (o.threads > 4096) { usage_error("--threads is %d: wanted at most 4096", o.threads); }
    within((double)o.generate, -1, MOST, "--generate");
    if (o.uses_a_model() && o.checkpoint.empty() && o.init_from.empty()) {
        usage_error("--generate, --eval, --export-hf and --info need a model\nHINT: --checkpoint DIR, or --init-from DIR for a Hugging Face folder");
    }
    if ((o.generate >= 0) + !o.eval.empty() + o.info + !o.export_hf.empty() > 1) { usage_error("--generate, --eval, --export-hf and --info are for one at a time"); }
    if (!o.uses_a_model() && !o.checkpoint.empty()) {
        usage_error("--checkpoint is '%s', but nothing is asked of it\nHINT: add --generate N, --eval FILE, --export-hf DIR or --info; to train on, use --out DIR --resume", o.checkpoint.c_str());
    }
    if (!o.checkpoint.empty() && !o.init_from.empty()) { usage_error("--checkpoint and --init-from are both given: one model at a time"); }
    if ((o.info || !o.export_hf.empty()) && o.checkpoint.empty()) { usage_error("%s needs --checkpoint", o.info ? "--info" : "--export-hf"); }
    if (!o.export_hf.empty()) {
        if (o.sync_factor < 1 && o.tp > 1) {
            usage_error("--export-hf: the checkpoint holds a model of %d ranks with private channels (--sync-factor %g); a Hugging Face model has one set of activations\n"
                        "HINT: --generate and --eval run it as it is; a model trained with --sync-factor 1 can be exported", o.tp, o.sync_factor);
        }
        o.tp = 1;  // without private channels the ranks are shards of one model
    }
    if (o.generate >= 0 && o.tokenizer.empty()) { usage_error("--generate needs --tokenizer FILE"); }
    if (o.sample_every > 0 && o.tokenizer.empty()) { usage_error("--sample-every needs --tokenizer FILE"); }
    if (!o.uses_a_model() && !o.dry_run && o.train.empty()) {
        usage_error("nothing to do: --train is missing\nHINT: --train 'shards/*.bin' trains, --dry-run shows what a run would need, --help is the manual");
    }
    if (o.resume && o.out.empty()) { usage_error("--resume needs --out, the folder that holds the checkpoints"); }
    if (o.save_every > 0 && o.out.empty()) { usage_error("--save-every is %lld, but --out is missing: nowhere to save", (long long)o.save_every); }
}

// The largest that divides a rank's share of a step into passes of MICRO_BATCH_TOKENS at most, and into as many as are to be under way at once.
i64 default_micro_batch(const Options& o) {
    const i64 share = o.global_batch / o.dp / o.passes_at_once();
    i64 sequences = std::max<i64>(std::min(MICRO_BATCH_TOKENS / o.seq, share / o.overlap_batches), 1);
    while (sequences > 1 && share % sequences != 0) { sequences--; }
    return sequences * o.passes_at_once();
}

}  // namespace

Options on_ranks(Options o, int dp) {
    o.dp = dp;
    if (o.micro_batch == -1) { o.micro_batch = default_micro_batch(o); }
    return o;
}

std::string options_to_json(const Options& options) { return to_json(options).dump(-1, ' ', false, json::error_handler_t::replace); }

bool parse_options(int argc, char** argv, bool speaks, Options& o) {
    // Defaults: a checkpoint's own options, else a Hugging Face folder's shape, else a preset.
    std::string where;
    if (const std::string dir = peek(argc, argv, "--checkpoint"); !dir.empty()) {
        where = latest_checkpoint(dir);
        if (where.empty()) {
            die("--checkpoint is '%s': there is no checkpoint\nHINT: wanted a folder step_NNNNNNNN with checkpoint.json, or the --out folder around it", dir.c_str());
        }
    } else if (peek_switch(argc, argv, "--resume")) {
        where = latest_checkpoint(peek(argc, argv, "--out"));
    }
    Options saved;
    const std::string preset = peek(argc, argv, "--model"), hf = peek(argc, argv, "--init-from");
    if (!where.empty()) {
        Checkpoint checkpoint(where);
        options_from_json(o, checkpoint.meta().at("options").dump());
        o.shape = checkpoint.model();
        o.checkpoint.clear(), o.init_from.clear(), o.eval.clear(), o.export_hf.clear();
        o.resume = o.info = o.dry_run = o.ignore_eos = o.no_graph = o.profile = false, o.generate = -1, o.trace.clear();
        o.threads = 0;                              // another host, perhaps
        if (launched_world().by_mpi) { o.dp = 0; }  // follows from the ranks there are
        if (peek(argc, argv, "--checkpoint").empty()) {
            if (!peek(argc, argv, "--lr").empty() && peek(argc, argv, "--min-lr").empty()) { o.min_lr = -1; }
        } else {  // used, not trained on
            o.dp = 1, o.prompt.clear(), o.log.clear(), o.train.clear(), o.val.clear(), o.out.clear();
            o.save_every = o.val_every = o.sample_every = o.insight_every = 0;
        }
        if (!preset.empty() && preset != o.model && o.model != "imported" && o.model != "custom") { usage_error("--model is '%s', but the checkpoint '%s' holds '%s'", preset.c_str(), where.c_str(), o.model.c_str()); }
    } else {
        apply_preset(o, preset.empty() ? o.model : preset);
        if (!hf.empty()) {
            o.shape = read_hf_config(hf);
            o.model = "imported";
            o.seq = std::min(o.seq, o.shape.max_positions > 0 ? o.shape.max_positions : o.seq);
        }
    }
    o.arch = o.shape.is_llama() ? "llama" : "gpt";
    o.positions = o.shape.rotary ? "rotary" : "learned";
    saved = o;

    CLI::App app("Trains, evaluates and runs GPT and Llama models under tensor parallelism with partially synchronised activations (CAAT-Net).\n"
                 "Exit code: 0 done, 1 failed while running, 2 wrong usage, 128+signal when stopped by one after saving.");
    app.get_formatter()->column_width(30);
    std::string ignored_model;  // --model has been applied already
    const CLI::Validator decimal(  // to CLI11, 010 is eight
        [](std::string& text) {
            const size_t digits = text.starts_with('-') ? 1 : 0, first = std::min(text.find_first_not_of('0', digits), text.size());
            if (text.size() > digits + 1 && first > digits && isdigit((unsigned char)text[digits + 1])) { text.erase(digits, std::min(first, text.size() - 1) - digits); }
            return std::string();
        },
        "");
    visit_flags(o, [&](const char* group, const char* flag, auto& field, const char* help) {
        using Field = std::remove_reference_t<decltype(field)>;
        std::string text = help;
        if (const size_t at = text.find("MODELS"); at != std::string::npos) { text.replace(at, 6, preset_names()); }
        CLI::Option* option;
        if constexpr (std::is_same_v<Field, bool>) {
            option = app.add_flag(std::string(flag) + ",!--no-" + key_of(flag), field, text);
        } else if (std::string(flag) == "--model") {
            option = app.add_option(flag, ignored_model, text);
        } else {
            option = app.add_option(flag, field, text)->capture_default_str();
        }
        if constexpr (std::is_integral_v<Field> && !std::is_same_v<Field, bool>) { option->transform(decimal); }
        option->group(group);
        if (option->get_expected_max() == 1) { option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast); }  // scripts append their own flags
    });
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        if (speaks) { fputs(app.help().c_str(), stdout); }
        return false;
    } catch (const CLI::ExtrasError&) {
        std::string unknown = app.remaining().empty() ? "" : app.remaining().front();
        for (const std::string& word : app.remaining()) {
            if (word.rfind("--", 0) == 0) { unknown = word; break; }
        }
        usage_error("unknown flag or word '%s'\nHINT: did you mean %s? --help lists all flags", unknown.c_str(), nearest_flag(o, unknown).c_str());
    } catch (const CLI::ParseError& error) {
        usage_error("%s\nHINT: --help lists all flags", error.what());
    }
    visit_flags(o, [&](const char*, const char* flag, auto& field, const char*) {
        for (const std::string& word : app.get_option(flag)->results()) {  // an unset shell variable, as a rule
            if (word.empty() && std::string(flag) != "--prompt") { usage_error("%s is given without a value", flag); }
        }
        if constexpr (std::is_same_v<std::remove_reference_t<decltype(field)>, double>) {
            if (!std::isfinite(field)) { usage_error("%s is %g: wanted a finite number", flag, field); }
        }
    });
    if (app.count("--heads") > 0 && app.count("--kv-heads") == 0 && where.empty()) { o.shape.kv_heads = o.shape.heads; }  // plain multi-head attention
    if (o.shape.channels != saved.shape.channels || o.shape.heads != saved.shape.heads) {
        if (o.shape.head_size == saved.shape.head_size && where.empty()) { o.shape.head_size = 0; }  // follows from the new width
    }
    if (where.empty() && hf.empty()) { o.shape.max_positions = 0; }  // follows from --seq
    finish(o);
    if (o.model != "imported" && where.empty()) {
        Options as_named;
        apply_preset(as_named, o.model);
        const ModelConfig &a = as_named.shape, &b = o.shape;
        if (a.arch != b.arch || a.layers != b.layers || a.channels != b.channels || a.heads != b.heads || a.kv_heads != b.kv_heads || a.ffn != b.ffn) { o.model = "custom"; }
    }
    if (speaks) { note_ineffective(o, [&](const char* flag) { return app.count(flag) > 0; }); }
    if (!where.empty()) {
        finish(saved = [&] { Options s = saved; s.dry_run = true; return s; }());
        compare_with_checkpoint(o, saved, where);
    }
    return true;
}

void options_from_json(Options& options, const std::string& text) {
    json j = json::parse(text);
    if (const auto it = j.find("overlap_batches"); it != j.end() && it->is_boolean()) { *it = it->get<bool>() ? 2 : 1; }  // it was a switch
    visit_flags(options, [&](const char*, const char* flag, auto& field, const char*) {
        const auto it = j.find(key_of(flag));
        if (it == j.end() || it->is_null()) { return; }
        try {
            it->get_to(field);
        } catch (const json::exception&) {
            die("the checkpoint says %s for %s, which is of another type\nHINT: it was written by another version; wanted one that this version saved", it->dump().c_str(), flag);
        }
    });
}
