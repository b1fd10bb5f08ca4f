mod bounds;
mod checks;
mod engines;
mod fabric;
mod known;
mod messages;
mod sim;
mod world;
