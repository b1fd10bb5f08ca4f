//! The backend keeps the contract, with both kinds of regions, in one process and across two.

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod mixed;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod shm {
    use std::sync::Arc;
    use std::time::Duration;

    use kvx_core::Result;
    use kvx_core::backend::TransferBackend;
    use kvx_core::config::BackendConfig;
    use kvx_shm::{Options, ShmBackend};
    use kvx_tests::suite::{Ground, Place, Setup, Stage, Subject};

    use super::mixed::Heap;

    pub(crate) struct Shm;

    impl Subject for Shm {
        fn name(&self) -> &'static str {
            "shm"
        }

        fn setups(&self) -> Vec<Setup> {
            let setup = |name| Setup::new(name).with_quiet(Duration::from_millis(8));
            vec![
                setup("shared").with_allocated_memory(),
                setup("borrowed"),
                // One side's memory is shared, that of the others borrowed.
                setup("mixed").with_allocated_memory(),
                // Several threads that copy, nothing within `submit`.
                setup("threads").with_allocated_memory(),
                // All of them in one transfer.
                setup("together").with_allocated_memory(),
            ]
        }

        fn reaches(&self, _: &str, place: Place) -> Result<(), String> {
            match place {
                Place::TwoNamespaces => {
                    Err("engines find each other within a network namespace".into())
                }
                _ => Ok(()),
            }
        }

        fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>> {
            Ok(Box::new(Over(ground.setup.clone())))
        }
    }

    /// The name of the setup.
    struct Over(String);

    impl Stage for Over {
        fn open(&self, side: &str) -> Result<Arc<dyn TransferBackend>> {
            let options: BackendConfig = match self.0.as_str() {
                "threads" => "copy_threads=3,inline_bytes=0",
                "together" => "copy_threads=3,inline_bytes=0,together_bytes=0",
                _ => "",
            }
            .parse()?;
            let backend = ShmBackend::open(&Options::read(&options)?)?;
            Ok(if self.0 == "mixed" && side != "one" { Arc::new(Heap(backend)) } else { backend })
        }
    }
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
kvx_tests::conformance!(shm::Shm);

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn main() {}
