//! The mock keeps the contract, in every preset, and so does its loopback.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::TransferBackend;
use kvx_core::capability::Limits;
use kvx_core::{Error, Result};
use kvx_mock::{Fabric, Loopback, Preset};
use kvx_tests::suite::{Fault, Ground, Place, Setup, Stage, Subject};

struct Mock;

impl Subject for Mock {
    fn name(&self) -> &'static str {
        "mock"
    }

    fn setups(&self) -> Vec<Setup> {
        let own = ["tiny", "unequal"];
        let simulated = Preset::NAMES.into_iter().chain(own).map(|name| Setup::stepped(name, 5));
        let loopback = Setup::new("loopback").with_quiet(Duration::from_millis(2));
        simulated.chain([loopback]).collect()
    }

    fn reaches(&self, _: &str, place: Place) -> Result<(), String> {
        match place {
            Place::OneProcess => Ok(()),
            _ => Err("the mock connects engines of one process".into()),
        }
    }

    fn faults(&self) -> &[Fault] {
        &[Fault::Kill, Fault::Stop, Fault::Resume]
    }

    fn stage(&self, ground: &Ground) -> Result<Box<dyn Stage>> {
        if ground.setup == "loopback" {
            return Ok(Box::new(Copying(Loopback::new()?)));
        }
        Ok(Box::new(Over { fabric: Fabric::new(ground.seed), setup: ground.setup.clone() }))
    }
}

/// A fabric, and the name of the setup.
struct Over {
    fabric: Fabric,
    setup: String,
}

impl Stage for Over {
    fn open(&self, side: &str) -> Result<Arc<dyn TransferBackend>> {
        let preset = match self.setup.as_str() {
            "tiny" => limited(&Preset::efa(), |limits| {
                limits.max_segment_bytes = 48;
                limits.max_batch_segments = 2;
                limits.max_notification_bytes = 8;
                limits.max_in_flight = 1;
            })?,
            "unequal" => limited(&Preset::rc(), |limits| {
                let one = side == "one";
                limits.max_segment_bytes = if one { 1000 } else { 300 };
                limits.max_batch_segments = if one { 4 } else { 9 };
                limits.max_notification_bytes = if one { 64 } else { 32 };
                limits.max_in_flight = if one { 4 } else { 16 };
            })?,
            name => Preset::by_name(name)?,
        };
        Ok(self.fabric.backend(preset, side))
    }

    fn inflict(&self, fault: Fault, side: &str) -> Result<()> {
        match fault {
            Fault::Kill => self.fabric.kill(side),
            Fault::Stop => self.fabric.stop(side),
            Fault::Resume => self.fabric.resume(side),
        }
    }
}

/// The fabric for speed tests.
struct Copying(Loopback);

impl Stage for Copying {
    fn open(&self, side: &str) -> Result<Arc<dyn TransferBackend>> {
        Ok(self.0.backend(side)?)
    }

    fn inflict(&self, fault: Fault, side: &str) -> Result<()> {
        match fault {
            Fault::Kill => self.0.kill(side),
            Fault::Stop => self.0.stop(side),
            Fault::Resume => self.0.resume(side),
        }
    }
}

/// A preset like `like`, with other limits.
fn limited(like: &Preset, change: impl FnOnce(&mut Limits)) -> Result<Preset, Error> {
    let mut capabilities = like.capabilities().clone();
    change(&mut capabilities.limits);
    Preset::custom(capabilities)
}

kvx_tests::conformance!(Mock);
