// make_shards.h: text -> shards of token ids and the side file that vouches for them; goes on where a run was broken off.
#pragma once

#include <signal.h>
#include <sys/file.h>

#include "data/resume.h"
#include "llmc/dataloader.h"

struct ShardOptions : PipelineOptions {
    std::string tokenizer, out;
    i64 shard_tokens = 100'000'000;
    double val_fraction = 0;
    bool bos = false, no_eos = false;  // which ids frame a document
    bool resume = false;
};

// By the document's place among all documents, so that the same inputs are always split the same way.
inline bool goes_to_val(i64 ordinal, double fraction) {
    const double uniform = (double)(mix64((uint64_t)ordinal) >> 11) * 0x1p-53;
    return uniform < fraction;
}

inline std::string side_path(const std::string& prefix) { return prefix + ".json"; }

// ---------------------------------------------------------------------------------------------------------------
// The place where a set will be

// Before the work, not after it.
inline void prepare_out(const std::string& out) {
    const std::string folder = parent_folder(out);
    check(!out.ends_with('/'), "--out '%s' is a folder; wanted a name in it\nHINT: --out %sNAME", out.c_str(), out.c_str());
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    check(!error, "--out '%s': cannot make the folder '%s': %s", out.c_str(), folder.c_str(), error.message().c_str());
    check(access(folder.c_str(), W_OK) == 0, "--out '%s': cannot write into '%s': %s", out.c_str(), folder.c_str(), strerror(errno));
}

// Two programs that write one --out would mix their files. Held by flock, so that it ends with its program, however that ends.
class OutLock {
public:
    explicit OutLock(const std::string& out) : path_(out + ".lock") {
        struct stat locked, named;
        do {  // until what is locked is what the name stands for: its last holder may have just removed it
            if (fd_ >= 0) { close(fd_); }
            fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
            check(fd_ >= 0, "--out '%s': cannot make '%s': %s", out.c_str(), path_.c_str(), strerror(errno));
            if (flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {  // other errors: a file system without locks
                close(fd_);
                die("--out '%s': another ./tokenize is writing it (it holds '%s')\nHINT: wait for it, or take another --out", out.c_str(),
                    path_.c_str());
            }
        } while (fstat(fd_, &locked) != 0 || stat(path_.c_str(), &named) != 0 || locked.st_ino != named.st_ino);
    }
    OutLock(const OutLock&) = delete;
    OutLock& operator=(const OutLock&) = delete;
    ~OutLock() {
        unlink(path_.c_str());
        close(fd_);
    }

private:
    std::string path_;
    int fd_ = -1;
};

// Shards of the set of this name, as its side file lists them; without folder.
inline std::vector<std::string> shards_of_old_set(const std::string& prefix) {
    std::vector<std::string> names;
    if (const auto old = read_token_set_info(side_path(prefix))) {
        for (const SplitInfo* split : {&old->train, &old->val}) {
            for (const ShardInfo& s : split->shards) { names.push_back(s.file); }
        }
    } else {
        check(!path_exists(side_path(prefix)), "'%s' exists and ./tokenize did not write it\nHINT: another --out, or move that file",
              side_path(prefix).c_str());
    }
    return names;
}

// Calls function(path, name of the shard) for each file that has the name of a shard of this set, followed by `suffix`.
template <typename Function>
void for_each_shard_file(const std::string& prefix, const std::string& suffix, Function function) {
    for (const auto& entry : std::filesystem::directory_iterator(parent_folder(prefix))) {
        std::string name = entry.path().filename().string();
        if (!name.ends_with(suffix)) { continue; }
        name.resize(name.size() - suffix.size());
        const std::string set = shard_prefix(name);
        if (set == base_name(prefix) || set == base_name(prefix) + VAL_SUFFIX) { function(entry.path().string(), name); }
    }
}

// An earlier set of this name will be replaced as a whole; shards that nobody vouches for are not touched.
inline void check_replaceable(const std::string& prefix) {
    const std::vector<std::string> ours = shards_of_old_set(prefix);
    for_each_shard_file(prefix, "", [&](const std::string& path, const std::string& name) {
        check(std::find(ours.begin(), ours.end(), name) != ours.end(),
              "'%s' is in the way: it would be taken for a part of the new set\nHINT: another --out, or remove that file", path.c_str());
    });
}

// What is written aside appears, in place of the set that had this name (old: its files, without folder). May be repeated after a break.
inline void publish_set(const std::string& prefix, const TokenSetInfo& info, const std::vector<std::string>& old,
                        const std::vector<ShardWriter*>& writers) {
    const std::string side = side_path(prefix), folder = parent_folder(prefix), aside = write_file_aside(side, token_set_text(info));
    unlink(side.c_str());  // first: shards without it are nobody's
    for (const std::string& name : old) {
        const bool is_new = std::any_of(writers.begin(), writers.end(), [&](const ShardWriter* w) { return w->has(name); }) &&
                            !path_exists(folder + "/" + name + ASIDE_SUFFIX);
        if (!is_new) { unlink((folder + "/" + name).c_str()); }
    }
    for (ShardWriter* w : writers) { w->publish(); }
    rename_file(aside, side);  // last: it vouches for the shards
    sync_folder(folder);
}

// So that what is done is kept. The second signal ends the program at once.
inline void stop_cleanly_on_signals() {
    struct sigaction action = {};
    action.sa_handler = [](int number) { stop_signal = number; };
    action.sa_flags = SA_RESETHAND | SA_RESTART;
    for (const int number : {SIGINT, SIGTERM}) { sigaction(number, &action, nullptr); }
    signal(SIGXFSZ, SIG_IGN);  // a file size limit then comes as an error of write
}

// ---------------------------------------------------------------------------------------------------------------

inline std::unique_ptr<Tokenizer> load_checked_tokenizer(const ShardOptions& options) {
    auto tokenizer = load_tokenizer(options.tokenizer);
    if (options.bos && tokenizer->bos_id < 0) { usage_error("--bos: tokenizer '%s' has no BOS id", options.tokenizer.c_str()); }
    if (!options.no_eos && tokenizer->eos_id < 0) {
        usage_error("tokenizer '%s' has no EOS id to end documents with\nHINT: --no-eos", options.tokenizer.c_str());
    }
    return tokenizer;
}

// Of this set, nor of one whose shards would have the same names: X_val_000000.bin is the set X_val's, and X's for validation.
inline void check_no_run_left(const std::string& prefix) {
    std::vector<std::string> sets = {prefix, prefix + VAL_SUFFIX};
    if (prefix.ends_with(VAL_SUFFIX)) { sets.push_back(prefix.substr(0, prefix.size() - strlen(VAL_SUFFIX))); }
    for (const std::string& set : sets) {
        const std::string state = run_state_path(set);
        check(!path_exists(state), "--out '%s': a run that was broken off left '%s'\nHINT: its command with --resume goes on from there; %s",
              prefix.c_str(), state.c_str(), begin_anew_hint(set).c_str());
    }
}
// Left by a run that was killed before it had a state.
inline void remove_asides(const std::string& prefix) {
    for_each_shard_file(prefix, ASIDE_SUFFIX, [](const std::string& path, const std::string&) { unlink(path.c_str()); });
}

// A set on its way from documents to files, and its state on the disk.
class SetWriter {
public:
    SetWriter(const ShardOptions& options, const Tokenizer& tokenizer, const std::vector<InputFile>& files, const Filter& filter)
        : options_(options),
          tokenizer_(tokenizer),
          summary_(files, options.stop_on_error),
          train_(options.out, tokenizer.vocab_size(), options.shard_tokens),
          val_(options.out + VAL_SUFFIX, tokenizer.vocab_size(), options.shard_tokens) {
        state_.inputs = &files;
        state_.options = {{"tokenizer", tokenizer.hash},
                          {"format", options.read.input_format},
                          {"text_key", options.read.text_key},
                          {"doc_separator", options.read.doc_separator},
                          {"split_documents", options.read.split_bytes},
                          {"shard_tokens", options.shard_tokens},
                          {"val_fraction", options.val_fraction},
                          {"bos", options.bos},
                          {"eos", !options.no_eos},
                          {"filter", filter.to_json()}};
    }

    // Finds out what an earlier run left. False if there is nothing to do: the set is complete.
    bool begin() {
        if (options_.resume && path_exists(run_state_path(options_.out))) {
            take_up();
            return true;
        }
        check_no_run_left(options_.out);
        if (const auto old = read_token_set_info(side_path(options_.out)); options_.resume && old && old->run == run()) { return false; }
        check_replaceable(options_.out);
        remove_asides(options_.out);
        return true;
    }

    const InputPosition& position() const { return state_.position; }
    bool publishing() const { return state_.publishing; }
    const Summary& summary() const { return summary_; }

    void add(const Work& work) {
        if (summary_.add(work)) {
            const bool is_val = goes_to_val(work.ordinal, options_.val_fraction);
            ShardWriter& writer = is_val ? val_ : train_;
            SplitInfo& split = is_val ? state_.val : state_.train;
            const size_t shards = writer.shards().size();
            if (options_.bos) { writer.write(std::span(&tokenizer_.bos_id, 1)); }
            writer.write(work.ids);
            if (!options_.no_eos) { writer.write(std::span(&tokenizer_.eos_id, 1)); }
            const i64 tokens = options_.bos + work.ids.size() + !options_.no_eos;
            split.documents++;
            split.tokens += tokens;
            split.text_bytes += work.text_bytes;
            summary_.add_tokens(work, tokens, tokenizer_);
            shard_full_ = shard_full_ || (shards > 0 && writer.shards().size() > shards);
        }
        state_.position = work.after;
        begun_ = true;
    }

    // Between two documents.
    void save_if_due() {
        if (begun_ && (often_.due() ? shard_full_ || seldom_.due() : false)) { save(); }
    }
    void save() {
        shard_full_ = false;
        train_.sync();
        val_.sync();
        state_.train.shards = train_.shards();
        state_.val.shards = val_.shards();
        state_.sources = summary_.to_json();
        write_run_state(options_.out, state_);
        train_.keep();
        val_.keep();
    }
    // Nothing is left of the run.
    void discard() {
        train_.discard();
        val_.discard();
        unlink(run_state_path(options_.out).c_str());
    }
    // Whether there is anything that a stop could lose.
    bool begun() const { return begun_; }

    // All shards and the side file appear.
    void publish() {
        if (!state_.publishing) {
            train_.finish();
            val_.finish();
            state_.replaces = shards_of_old_set(options_.out);
            state_.publishing = true;
            save();
        }
        publish_set(options_.out, info(), state_.replaces, {&train_, &val_});
        unlink(run_state_path(options_.out).c_str());
    }

    TokenSetInfo info() const {
        const SourceCounts all = summary_.total();
        TokenSetInfo info;
        info.tokenizer_file = options_.tokenizer;
        info.tokenizer_kind = tokenizer_.kind;
        info.tokenizer_hash = tokenizer_.hash;
        info.vocab = tokenizer_.vocab_size();
        info.bos = options_.bos;
        info.eos = !options_.no_eos;
        info.bos_id = tokenizer_.bos_id;
        info.eos_id = tokenizer_.eos_id;
        info.train = state_.train;
        info.val = state_.val;
        info.problems = all.problems;
        info.dropped = all.dropped;
        info.sources = summary_.to_json();
        info.run = run();
        return info;
    }

private:
    std::string run() const { return run_hash(state_.options, *state_.inputs); }

    void take_up() {
        state_ = read_run_state(options_.out, state_);
        summary_.set_from_json(state_.sources);
        begun_ = true;
        if (state_.publishing) {
            train_.resume_publish(state_.train.shards);
            val_.resume_publish(state_.val.shards);
            return;
        }
        check_replaceable(options_.out);
        train_.resume(state_.train.shards);
        val_.resume(state_.val.shards);
        for_each_shard_file(options_.out, ASIDE_SUFFIX, [&](const std::string& path, const std::string& name) {  // begun after the state
            if (!train_.has(name) && !val_.has(name)) { unlink(path.c_str()); }
        });
        fprintf(stderr, "tokenize: going on after %s documents, in input %s of %zu\n", grouped(state_.position.ordinal).c_str(),
                grouped(state_.position.file + 1).c_str(), state_.inputs->size());
    }
    const ShardOptions& options_;
    const Tokenizer& tokenizer_;
    Summary summary_;
    ShardWriter train_, val_;
    RunState state_;
    bool begun_ = false, shard_full_ = false;
    Every often_{0.2}, seldom_{20};  // seconds: at most, at least
};

inline void print_split(const char* name, const std::string& prefix, const SplitInfo& split) {
    if (split.tokens == 0) { return; }
    const std::string text = split.text_bytes == 0 ? ""
                                                   : format(", %s bytes of text (%.3f per token)", grouped(split.text_bytes).c_str(),
                                                            (double)split.text_bytes / (double)split.tokens);
    printf("%-5s %s documents, %s tokens%s, %zu shard(s): %s%s\n", name, grouped(split.documents).c_str(), grouped(split.tokens).c_str(),
           text.c_str(), split.shards.size(), shard_path(prefix, 0).c_str(), split.shards.size() > 1 ? " ..." : "");
}

// All documents -> shards, still aside.
inline void write_all(SetWriter& set, const ShardOptions& options, const std::vector<InputFile>& files, const Filter& filter,
                      const Tokenizer& tokenizer) {
    Pipeline pipeline(options, files, filter, &tokenizer, set.position());
    Progress progress(files, pipeline.packed_done(), set.summary().total().text_bytes);
    const auto between = [&] {
        set.save_if_due();
        if (progress.due()) { progress.show(set.summary().total(), pipeline.packed_done()); }
    };
    while (const Work* work = pipeline.next(between)) {
        set.add(*work);
        set.save_if_due();
    }
    const TokenSetInfo info = set.info();
    if (info.train.tokens == 0) {
        set.discard();
        die("no training tokens came out of %s documents (problems: %s; dropped: %s)\nHINT: look at --text-key; with --val-fraction, one "
            "document is not enough: see --split-documents",
            grouped(info.val.documents).c_str(), counts_text(info.problems).c_str(), counts_text(info.dropped).c_str());
    }
    if (options.val_fraction > 0 && info.val.tokens == 0) {
        fprintf(stderr,
                "tokenize: no document fell to validation: there are only %s\nHINT: --split-documents or --doc-separator makes more of a "
                ".txt\n",
                grouped(info.train.documents).c_str());
    }
}

inline void make_shards(const ShardOptions& options) {
    const auto tokenizer = load_checked_tokenizer(options);
    const Filter filter(options.filter);
    const std::vector<InputFile> files = list_inputs(options.inputs, options.read.input_format);
    prepare_out(options.out);
    const OutLock lock(options.out), val_lock(options.out + VAL_SUFFIX);
    SetWriter set(options, *tokenizer, files, filter);
    if (!set.begin()) {
        printf("'%s' is complete: these inputs and options made it\n", side_path(options.out).c_str());
        return;
    }
    stop_cleanly_on_signals();
    const std::string state = run_state_path(options.out);
    try {
        if (!set.publishing()) { write_all(set, options, files, filter, *tokenizer); }
        set.publish();
    } catch (const Stopped& stopped) {
        if (!set.begun()) { throw Stopped(stopped.exit_code, "stopped by a signal; nothing was written"); }
        set.save();
        throw Stopped(stopped.exit_code,
                      format("stopped by a signal; what is done is kept\nHINT: --resume goes on from '%s'", state.c_str()));
    } catch (const Error& e) {
        if (!path_exists(state)) { throw; }
        throw Error(e.exit_code, format("%s\nHINT: --resume goes on from '%s', when the cause is gone", e.what(), state.c_str()));
    }
    const TokenSetInfo info = set.info();
    print_split("train", options.out, info.train);
    print_split("val", options.out + VAL_SUFFIX, info.val);
    printf("problems: %s\n", counts_text(info.problems).c_str());
    if (filter.active()) { printf("dropped: %s\n", counts_text(info.dropped).c_str()); }
}
