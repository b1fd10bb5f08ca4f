//! Exists so that `links` in Cargo.toml takes effect: two versions of kvx-core in one graph are a resolver error.

fn main() {}
